"""Embeddings whose rows are not parameters of the module: sparse tables (docs/sparse-tables.md).

A forward pass looks up each row of its batch once, and keeps the rows only as long as autograd
needs them. Hooks in the backward pass collect the rows' gradients in the table until the step uses
them: under async_sgd and ddp, `optimizer.step()` pushes them to the parameter servers; in a single
process, `apply_gradients` applies them. Rows come from a `RowSource`: at first from this process
(`OwnRows`), and from the servers once `as_distributed` has been called.

May be used only on the training thread, apart from these hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NoReturn, Protocol, Self

import numpy as np
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_common.optimizers.for_servers import TABLE_OPTIMIZERS
from shoal_common.optimizers.for_torch import RowWiseAdagrad
from shoal_common.tables.declaration import DEFAULT_BUCKETS, MOST_BUCKETS, TableSpec, wrong_shape
from shoal_common.tables.rows import Rows
from shoal_common.tables.values import Ids, Values
from shoal_common.tables.wire import combined
from torch import nn
from torch.nn import functional

from shoal_worker.torch_internals import uncompiled

_FULL_BUCKET_BYTES: Final = 64 << 20
"""Maximum size of a bucket, in bytes, in a table with a known number of rows. Used if `buckets` is
not given."""
_SCALE: Final = 0.01
_FEWEST_BUCKETS: Final = 4
_FEWEST_ROWS: Final = 256
"""Minimum number of rows per bucket. Used if `buckets` is not given."""
_MODES: Final = ("sum", "mean", "max")

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Function that creates an optimizer for a list of parameters, such as
`functools.partial(torch.optim.SparseAdam, lr=1e-3)`."""


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """Rows returned by a lookup."""

    values: Values
    """The rows, of shape `[n, dim]`."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Version that each of the table's partitions had when its rows were read; the oldest one if
    several requests were needed. Empty if the rows are in this process."""


class RowSource(Protocol):
    """Source of a table's rows."""

    def look_up(self, ids: Ids) -> LookedUp:
        """Returns the rows with these ids. The ids must be distinct."""

    def prefetch(self, ids: Ids) -> None:
        """Prefetches the rows with these ids, which will be looked up soon. The ids must be
        distinct."""


class OwnRows:
    """The rows of a table that is stored in this process."""

    def __init__(self, spec: TableSpec, dim: int, like: OwnRows | None = None) -> None:
        """Creates a table. `like`: table whose rows are copied; None: the table is empty."""
        # A single bucket contains all rows, so it may keep the table's maximum number of rows.
        self.rows: Rows = Rows(
            replace(spec, buckets=1), dim, None if like is None else like.rows.image()
        )
        self._steps: int = 0 if like is None else like._steps

    def look_up(self, ids: Ids) -> LookedUp:
        """Implements `RowSource.look_up`."""
        return LookedUp(values=self.rows.values(ids))

    def prefetch(self, ids: Ids) -> None:
        """Does nothing: the rows are local."""

    def apply(self, ids: Ids, gradients: Values) -> None:
        """Applies the gradients of one step."""
        self._steps += 1
        self.rows.update(ids, gradients, self._steps)


@dataclass(frozen=True, kw_only=True)
class RowGradients:
    """Gradients of one table in a step. Each id occurs once, in ascending order."""

    ids: Ids
    values: Values
    """Gradients, of shape `[n, dim]`. May contain NaN or infinity."""
    versions: Mapping[int, int]
    """Versions of the rows that the gradients were computed with, by partition; the oldest version
    if there were several lookups. See `LookedUp.versions`."""


class SparseEmbedding(nn.Module):
    """Looks up rows by id in a table that may be larger than this process's memory. Used like
    `torch.nn.Embedding`.

    A row's initial value is computed from `seed` and its id, in the same way in every process; the
    row is stored only once it has received a gradient. The rows are not parameters: neither
    `parameters()` nor `state_dict()` contains them, and clipping ignores them. Train with
    `strategy="async_sgd"` or `strategy="ddp"`, where the rows are on the parameter servers; in a
    single process, call `apply_gradients` in addition to `optimizer.step()`.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        name: str,
        optimizer: OptimizerFactory = RowWiseAdagrad,
        seed: int = 0,
        initializer: str = "normal",
        scale: float | None = None,
        max_rows: int = 0,
        max_age: int = 0,
        buckets: int | None = None,
    ) -> None:
        """
        Args:
            num_embeddings: number of ids, which are 0 to `num_embeddings - 1`; None: ids are any
                64-bit numbers, such as hashes.
            embedding_dim: number of elements in a row, in float32; 1 to 16384.
            name: name of the table; must be the same in all workers, and different from the names
                of all parameters.
            optimizer: function that creates the optimizer for the rows: torch.optim.SGD,
                torch.optim.Adagrad, torch.optim.SparseAdam or shoal.optim.RowWiseAdagrad, without
                momentum or weight decay.
            seed: seed of the initial values, 0 to 2**64 - 1.
            initializer: "normal" with standard deviation `scale`, "uniform" in [-scale, scale), or
                "zeros".
            scale: scale of the initial values, 0 to 1e6; None: 0.01, or 0 with "zeros", which does
                not accept any other scale.
            max_rows: maximum number of rows that the table keeps, divided among the buckets. The
                least recently pushed rows are evicted first, and return to their initial values. 0:
                no limit.
            max_age: number of steps that a row is kept without a push before it is evicted;
                eviction may happen up to a sixteenth of this number later. 0: rows are never
                evicted for their age.
            buckets: number of partitions that the rows are divided into, 1 to 1024, of at most 256
                MiB each. None: 16; with `num_embeddings`, enough that no partition exceeds 64 MiB,
                and at least 4; with `max_rows`, few enough that each keeps 256 rows or more.

        Raises:
            ConfigurationError: an invalid value.
        """
        super().__init__()
        shape = (num_embeddings or 0, embedding_dim)
        if not 1 <= len(name) <= 512:
            raise ConfigurationError(
                f"name={name!r}: expected 1 to 512 characters, the same name in all workers"
            )
        if num_embeddings is not None and not 1 <= num_embeddings <= 1 << 63:
            raise ConfigurationError(
                f"num_embeddings={num_embeddings}: expected 1 to 2**63, or None for any 64-bit id"
            )
        if problem := wrong_shape(shape):
            raise ConfigurationError(f"table {name!r}: {problem}")
        chosen, hyperparameters = _read_optimizer(name, optimizer, embedding_dim)
        self.name = name
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.spec = TableSpec.with_defaults(
            buckets=_enough_buckets(shape, chosen, max_rows) if buckets is None else buckets,
            seed=seed,
            initializer=initializer,
            scale=float(scale) if scale is not None else 0.0 if initializer == "zeros" else _SCALE,
            optimizer=chosen,
            hyperparameters=hyperparameters,
            max_rows=max_rows,
            max_age=max_age,
        )
        if problem := self.spec.contradiction():
            raise ConfigurationError(f"table {name!r}: {problem}")
        self._own: OwnRows | None = OwnRows(self.spec, embedding_dim)
        self._source: RowSource = self._own
        self._gathered: list[tuple[torch.Tensor, torch.Tensor, Mapping[int, int]]] = []
        """Ids, gradients and versions for each lookup of this step whose gradients have been
        computed in a backward pass."""
        self._trains = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows by id, on the device of `ids`. `ids`: integers of shape `[*]`. The result
        has shape `[*, embedding_dim]` and dtype float32.

        Raises:
            ConfigurationError: the ids are not integers, or not ids of this table.
            DeadlineError (SERVER_AWAY): a server was unreachable for longer than `server_timeout`.
        """
        rows, places = self._look_up(ids)
        return functional.embedding(places, rows)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Prefetches the rows of a future batch in the background; returns immediately. The first
        lookup whose ids are all among `ids` uses the prefetched rows. They do not include pushes
        made after the prefetch, not even this worker's own."""
        self._source.prefetch(self._checked(ids).unique().cpu().numpy())

    def apply_gradients(self) -> None:
        """Ends a step of a table whose rows are in this process: applies the gradients of all
        lookups since the last step.

        Raises:
            PreconditionError: the rows are on parameter servers, where `optimizer.step()` applies
                the gradients.
        """
        if self._own is None:
            raise PreconditionError(
                f"table {self.name!r} is stored on the parameter servers, to which "
                "optimizer.step() pushes its gradients; do not call apply_gradients"
            )
        gradients = self.gradients()
        if gradients is not None:
            self._own.apply(gradients.ids, gradients.values)
            self.drop_gradients()

    # ------------------------------------------------------------------------------- for the engine

    @property
    def shape(self) -> tuple[int, int]:
        """Declared shape: number of rows (0 if ids are any 64-bit numbers), and number of elements
        in a row."""
        return self.num_embeddings or 0, self.embedding_dim

    def come_from(self, source: RowSource) -> None:
        """Makes `source` the source of the rows.

        Raises:
            ConfigurationError: rows have been trained in this process, and would be lost.
        """
        if self._own is not None and len(self._own.rows):
            raise ConfigurationError(
                f"table {self.name!r} has {len(self._own.rows)} rows that were trained in this "
                "process, which would be missing from the parameter servers; call as_distributed "
                "before apply_gradients"
            )
        self._own, self._source = None, source

    def gradients(self) -> RowGradients | None:
        """Returns the step's gradients, summed by id; None if there are none. The table keeps them
        until `drop_gradients` is called."""
        if not self._gathered:
            return None
        ids = np.concatenate([ids.cpu().numpy() for ids, _, _ in self._gathered])
        given = np.concatenate(
            [gradient.detach().float().cpu().numpy() for _, gradient, _ in self._gathered]
        )
        unique, values = combined(ids, given)
        versions = [versions for _, _, versions in self._gathered]
        oldest = {partition: min(each[partition] for each in versions) for partition in versions[0]}
        return RowGradients(ids=unique, values=values, versions=oldest)

    def drop_gradients(self) -> None:
        """Discards the step's gradients, once they have been used or are no longer needed."""
        self._gathered.clear()

    # ----------------------------------------------------------------------- overrides of nn.Module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients that this table has collected in the current step."""
        super().zero_grad(set_to_none)
        self.drop_gradients()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets whether later lookups train the rows. Must be called on the table itself: a module
        that contains the table does not forward the call, because the rows are not parameters."""
        self._trains = requires_grad
        return super().requires_grad_(requires_grad)

    def extra_repr(self) -> str:
        """Returns the text for `repr`."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, name={self.name!r}, "
            f"optimizer={self.spec.optimizer}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseEmbedding:
        """Returns a copy of the module without gradients. The copy uses the same servers or, if the
        rows are in this process, has its own copy of the rows."""
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        memo[id(self)] = copied
        shared = {name: value for name, value in vars(self).items() if name not in vars(copied)}
        copied.__dict__.update(shared, training=self.training, _gathered=[])
        if self._own is not None:
            copied._source = copied._own = OwnRows(self.spec, self.embedding_dim, self._own)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Rejects pickling, because the rows are not part of the module.

        Raises:
            PreconditionError: always.
        """
        raise PreconditionError(
            f"a model with the sparse table {self.name!r} cannot be pickled; save "
            "model.state_dict() instead, which omits the rows"
        )

    # -------------------------------------------------------------------------------------- lookups

    @uncompiled
    def _look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the distinct rows of a batch, and for each id the index of its row among them."""
        unique, places = self._checked(ids).unique(return_inverse=True)
        found = self._source.look_up(unique.cpu().numpy())
        rows = torch.from_numpy(found.values).to(ids.device)
        if torch.is_grad_enabled() and self._trains:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(self._gather, unique, found.versions))
        return rows, places

    def _gather(self, ids: torch.Tensor, versions: Mapping[int, int], rows: torch.Tensor) -> None:
        if rows.grad is not None:
            self._gathered.append((ids, rows.grad, versions))
            rows.grad = None

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise ConfigurationError(
                f"table {self.name!r}: ids have dtype {ids.dtype}; expected whole numbers (int64)"
            )
        ids = ids.long()
        if self.num_embeddings is not None and ids.numel():
            least, most = (int(each) for each in torch.aminmax(ids))
            if least < 0 or most >= self.num_embeddings:
                raise ConfigurationError(
                    f"table {self.name!r}: id {least if least < 0 else most}; expected 0 to "
                    f"{self.num_embeddings - 1} (num_embeddings)"
                )
        return ids


class SparseEmbeddingBag(SparseEmbedding):
    """Looks up bags of rows, and returns the sum, mean or maximum of each bag. Used like
    `torch.nn.EmbeddingBag`."""

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, *, mode: str = "mean", **options: Any
    ) -> None:
        """
        Args:
            num_embeddings, embedding_dim: as in `SparseEmbedding`.
            mode: "sum", "mean" or "max" of the rows in a bag. An empty bag gives zeros.
            **options: as in `SparseEmbedding`.

        Raises:
            ConfigurationError: an invalid value.
        """
        if mode not in _MODES:
            raise ConfigurationError(f"mode={mode!r}: expected one of {', '.join(_MODES)}")
        super().__init__(num_embeddings, embedding_dim, **options)
        self.mode = mode

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the bags as float32 of shape `[bags, embedding_dim]`.

        Args:
            ids: ids of the rows, of shape `[bags, ids per bag]`; with `offsets`, of shape `[ids in
                total]`.
            offsets: start of each bag, of shape `[bags]`.
            per_sample_weights: factor of each row, in the shape of `ids`; only with mode "sum".

        Raises:
            ConfigurationError, DeadlineError: as in `SparseEmbedding`.
        """
        rows, places = self._look_up(ids)
        return functional.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights
        )


def tables_of(module: nn.Module) -> list[SparseEmbedding]:
    """Returns all tables of a module, each once, sorted by name."""
    found = [each for each in module.modules() if isinstance(each, SparseEmbedding)]
    return sorted(found, key=lambda table: table.name)


def check_unscaled(*, scaled: bool) -> None:
    """Raises ConfigurationError if a GradScaler scales the losses of a model with sparse tables."""
    if scaled:
        raise ConfigurationError(
            "a GradScaler cannot be used with sparse tables, because it does not see the "
            "gradients of their rows; train in float32 or bfloat16, without a scaler"
        )


def _read_optimizer(name: str, factory: OptimizerFactory, dim: int) -> tuple[str, dict[str, float]]:
    """Returns the optimizer's name and hyperparameters, as the servers use them."""
    made = factory([nn.Parameter(torch.zeros(1, dim))])
    for declared in TABLE_OPTIMIZERS.values():
        if declared.optimizer_class() is type(made):
            return declared.name, declared.read(made.param_groups[0])
    raise ConfigurationError(
        f"table {name!r}: optimizer={type(made).__module__}.{type(made).__qualname__}; expected a "
        "factory of torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam or "
        "shoal.optim.RowWiseAdagrad, such as functools.partial(torch.optim.Adagrad, lr=1e-2)"
    )


def _enough_buckets(shape: tuple[int, int], optimizer: str, max_rows: int) -> int:
    rows, dim = shape
    per_row = (
        4
        * dim
        * (1 + TABLE_OPTIMIZERS[optimizer].state_tensors(TABLE_OPTIMIZERS[optimizer].defaults))
        + 32
    )
    buckets = _FEWEST_BUCKETS if rows else DEFAULT_BUCKETS
    while buckets < MOST_BUCKETS and rows * per_row > buckets * _FULL_BUCKET_BYTES:
        buckets *= 2
    # A hash puts more rows into some buckets than into others, which matters if each bucket may
    # keep only few rows.
    return min(buckets, max(1, max_rows // _FEWEST_ROWS)) if max_rows > 0 else buckets
