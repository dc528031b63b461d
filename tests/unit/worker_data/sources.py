"""Streams of whole numbers, as users write them."""

from torch.utils.data import IterableDataset


class Numbers(IterableDataset):
    """The numbers below `n`, another order each epoch; each time it is iterated it starts anew."""

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
    """One that goes on where its state says."""

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
    """One whose state leads to another place than it was taken at, as that of a shuffle buffer
    does."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "at": state["at"] + 3})
