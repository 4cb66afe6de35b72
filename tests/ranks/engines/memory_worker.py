"""train_rl.py that prints the bytes on the device of each training model before each generation."""

import json

import train_rl


def bytes_held(model) -> int:
    from rl.training.gradients import gradient_buffers
    from rl.training.optimizer import optimizer_tensors

    tensors = [*model.model.parameters()]
    if model.optimizer is not None:
        tensors += gradient_buffers(model.wrapped)
        tensors += optimizer_tensors(model.optimizer)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def printing_run(*args):
    from rl.engines.memory import MemorySharing

    to_generation = MemorySharing.to_generation

    def and_print(self, *args):
        metrics = to_generation(self, *args)
        print(json.dumps([bytes_held(model) for model in self.engines.training.values()]))
        return metrics

    MemorySharing.to_generation = and_print
    run(*args)


if __name__ == "__main__":
    run, train_rl.watched_run = train_rl.watched_run, printing_run
    train_rl.leave(train_rl.main())
