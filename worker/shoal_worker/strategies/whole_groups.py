"""Parameter groups and optimizer state as the user's script sees them if the optimizer updates only
pieces of parameters.

The user's optimizer updates this rank's pieces: flat parts of parameters, which this rank owns or
mirrors. If a script read a norm, a shape or a number of elements from its groups, the result would
describe the pieces. A script therefore receives different groups: their settings are those of the
optimizer's groups (reads and writes are forwarded), and their parameters are the model's own, which
the script passed to the optimizer. These parameters are either unsharded, or raise an error when
their values are used (`hidden_parameters.py`). The error names the function to call instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import PreconditionError

from shoal_worker.elastic.state.schedulers_and_scalers import GroupMembers, Memberships

_MEMBERS: Final = "params"


class WholeGroup(dict[str, Any]):
    """One parameter group as a script sees it: the settings of the optimizer's group, with the
    model's parameters. A dict, because torch's groups are dicts."""

    # The inherited methods would operate on the entries of the dict itself, which is empty.
    keys, values, items = Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]
    get = Mapping.get  # type: ignore[assignment]
    pop, popitem = MutableMapping.pop, MutableMapping.popitem
    clear = MutableMapping.clear
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __init__(self, find: Callable[[], dict[str, Any]], members: Sequence[torch.Tensor]) -> None:
        """Creates the view. `find`: returns the optimizer's current group, which is a different
        object after a state has been loaded. `members`: the model's parameters in the group."""
        super().__init__()
        self._find = find
        self._members: Any = members

    def __getitem__(self, key: str) -> Any:
        return self._members if key == _MEMBERS else self._find()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == _MEMBERS:
            self._members = value
        else:
            self._find()[key] = value

    def __delitem__(self, key: str) -> None:
        if key == _MEMBERS:
            raise PreconditionError(
                "the 'params' of a parameter group cannot be deleted; keep the parameters passed "
                "to as_distributed"
            )
        del self._find()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())

    def __contains__(self, key: object) -> bool:
        return key in self._find()

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __eq__(self, other: object) -> bool:
        return self is other or (not isinstance(other, WholeGroup) and dict(self) == other)

    __hash__ = None  # as for any dict

    def __ior__(self, other: Any) -> WholeGroup:  # type: ignore[override]  # one signature only
        self.update(other)
        return self

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        # only one signature is supported
        """Returns a plain dict with the contents of both."""
        merged: dict[str, Any] = dict(self) | other
        return merged

    def copy(self) -> dict[str, Any]:
        """Returns the contents as a plain dict."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class WholeGroups:
    """All parameter groups of one optimizer, as the user's script sees them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """`optimizer`: the user's optimizer, whose groups must still contain the unsharded
        parameters. `parameters`: the model's parameters by name."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._names = [
            [names.get(id(member), "") for member in group[_MEMBERS]]
            for group in optimizer.param_groups
        ]
        self._optimizer = optimizer
        self._known = Memberships()
        self.groups: list[dict[str, Any]] = [
            WholeGroup(self._finder(number), group[_MEMBERS])
            for number, group in enumerate(optimizer.param_groups)
        ]
        """The groups as the user's script sees them."""
        self._given = tuple(self.groups)
        self._known.begin(self.groups)

    def _finder(self, number: int) -> Callable[[], dict[str, Any]]:
        return lambda: self._optimizer.param_groups[number]

    def follow(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Replaces the parameters in the groups with the model's current ones. `parameters`: the
        model's parameters by name."""
        self.check()
        for group, names in zip(self.groups, self._names, strict=True):
            found = [
                parameters.get(name, member)
                for name, member in zip(names, group[_MEMBERS], strict=True)
            ]
            if any(one is not other for one, other in zip(found, group[_MEMBERS], strict=True)):
                group[_MEMBERS] = GroupMembers(found)

    def check(self) -> None:
        """Raises ConfigurationError if the script has changed the parameters in a group, and
        PreconditionError if it has added, removed or replaced groups."""
        if len(self.groups) != len(self._given) or any(
            one is not other for one, other in zip(self.groups, self._given, strict=True)
        ):
            raise PreconditionError(
                "optimizer.param_groups was changed after as_distributed: it has "
                f"{len(self.groups)} groups, and they are not the {len(self._given)} groups "
                "passed to as_distributed; add parameter groups to the optimizer before "
                "as_distributed"
            )
        self._known.check(self.groups)


class StateOfPieces(MutableMapping[Any, Any]):
    """Optimizer state, keyed by the pieces of parameters. Looking up one of the model's own
    parameters raises an error, whereas torch's dict would create an empty entry."""

    def __init__(
        self, state: MutableMapping[Any, Any], groups: Sequence[dict[str, Any]], strategy: str
    ) -> None:
        self._state, self._groups, self._strategy = state, groups, strategy

    def __getitem__(self, key: Any) -> Any:
        if key not in self._state and any(
            key is member for group in self._groups for member in group[_MEMBERS]
        ):
            raise PreconditionError(
                f"optimizer.state[parameter] with strategy={self._strategy!r}: this rank has "
                "state only for its pieces of parameters; call optimizer.state_dict() on every "
                "rank to get the whole state"
            )
        return self._state[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the state of a piece, or `default` without creating an entry."""
        return self[key] if key in self else default  # noqa: SIM401 - its own get makes an entry

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, key: object) -> bool:
        return key in self._state
