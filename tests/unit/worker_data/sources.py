"""Streams of integers, as users write them."""

from torch.utils.data import IterableDataset


class Numbers(IterableDataset):
    """A stream of the numbers below `n` in a different order each epoch. Each iteration starts from
    the beginning."""

    def __init__(self, n, step=7):
        self.n, self.step, self.epoch, self.read = n, step, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return [(self.step * i + self.epoch) % self.n for i in range(self.n)]

    def __iter__(self):
        for number in self.order():
            self.read += 1
            yield number


class Seeking(Numbers):
    """A stream that continues from its loaded state."""

    at = start = 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start, self.epoch = state["at"], state["epoch"]

    def __iter__(self):
        self.at, self.start = self.start, 0
        order = self.order()
        while self.at < self.n:
            self.at += 1
            self.read += 1
            yield order[self.at - 1]


class Forgetful(Seeking):
    """A stream whose loaded state leads to another position than it was taken at, like that of a
    shuffle buffer."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "at": state["at"] + 3})
