"""A taskset of verifiers: add two numbers; the answer is the reply's last word."""

import verifiers.v1 as vf


class AddingData(vf.TaskData):
    total: int


class AddingTask(vf.Task[AddingData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [str(self.data.total)])


class AddingTaskset(vf.Taskset[AddingTask, vf.TasksetConfig]):
    def load(self):
        for a in range(10):
            for b in range(10):
                data = AddingData(prompt=f"{a} + {b} =", total=a + b)
                yield AddingTask(data, self.config.task)


__all__ = ["AddingTaskset"]
