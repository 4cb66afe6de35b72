"""`<run.dir>/rollouts/`: the samples that each step learned from, a parquet file per step; and
`<run.dir>/validation/greedy` and `sampled`: the samples of each validation.

    pandas.read_parquet("runs/mine/rollouts")
    datasets.load_dataset("parquet", data_files="runs/mine/rollouts/*.parquet")

A row is a sample, or one row of a trajectory that has several. `<run.dir>/tokens.json` has the text of every
token id, so that readers need no tokenizer. docs/report.md describes the columns.
"""

import json
import queue
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.run_directory.delayed_writes import DelayedWrites

if TYPE_CHECKING:  # pyarrow is imported by the runs that store or read rollouts
    import pyarrow as pa

DIRECTORY = "rollouts"
VALIDATIONS = {name: f"validation/{name}" for name in ("greedy", "sampled")}
"""Pass of a validation (`rl.run.validation`) -> directory of its samples."""
DIRECTORIES = (DIRECTORY, *VALIDATIONS.values())
SAMPLED_GROUPS = 4
"""Number of groups per step that `logging.rollouts=sample` stores."""
TOKENS_FILE = "tokens.json"
GIVEN_BY = ("tool", "user", "environment")
"""Sources of tokens with the entries 0, -1 and -2 in `turns` (`rl.rollout.samples.SOURCES`)."""
WAITING_STEPS = 2
"""Number of steps that may wait to be written; the next one blocks, which bounds the memory."""


def schema(columns: Mapping[str, str], kind: str) -> "pa.Schema":
    """Return the schema of a file.

    columns: type of each column; a plural is a list. kind: the `logging.rollouts` that it is written with.
    """
    import pyarrow as pa

    def type_of(name: str) -> "pa.DataType":
        if name == "messages":
            return pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
        element = getattr(pa, {"bool": "bool_"}.get(name, name.removesuffix("s")))()
        return pa.list_(element) if name.endswith("s") else element

    return pa.schema({name: type_of(kind) for name, kind in columns.items()}, {"rollouts": kind})


def stored_steps(run_dir: str | Path, directory: str = DIRECTORY) -> dict[int, Path]:
    """Return the files with rollouts by step, in order. directory: one of DIRECTORIES."""
    files = sorted(Path(run_dir, directory).glob("step_*.parquet"))
    found = ((re.fullmatch(r"step_(\d+)", path.stem), path) for path in files)
    return {int(match[1]): path for match, path in found if match and path.is_file()}


def read(path: Path, columns: list[str] | None = None) -> "pa.Table":
    """Return a step's rollouts; None for all columns."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read(columns=columns)


def ground_truth(text: str | None, is_json: bool) -> Any:
    """Return the ground truth of a row from its columns `ground_truth` and `ground_truth_is_json`."""
    return json.loads(text) if is_json and text is not None else text


def remove_after(run_dir: str | Path, step: int, directory: str = DIRECTORY) -> None:
    """Remove the files of steps after `step`, which are repeated, and incomplete files."""
    for number, path in stored_steps(run_dir, directory).items():
        if number > step:
            path.unlink()
    for path in Path(run_dir, directory).glob("*.partial"):
        path.unlink()


class RolloutLog:
    """Writes rollouts in a thread, so that no step waits for them. For rank 0 only; not collective.

    If the disk is full, a step's rollouts are tried again at the next step, and given up after WAITING_STEPS.
    Another error of the thread is raised by the next call.

    Args:
        columns, kind: see `schema`.
        token_texts: returns the text of every token id; called in the thread, once.
        fence: called in the thread before it writes a file; an exception from it ends the writing.
    """

    def __init__(
        self,
        run_dir: str | Path,
        columns: Mapping[str, str],
        *,
        kind: str,
        token_texts: Callable[[], list[str]],
        fence: Callable[[], None] = lambda: None,
    ):
        self._run_dir, self._schema = Path(run_dir), partial(schema, columns, kind)
        self._token_texts = token_texts
        self._fence = fence
        directory = self._run_dir / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        self._error: Exception | None = None
        self._writes = DelayedWrites(directory, limit=WAITING_STEPS)
        self._jobs: queue.Queue = queue.Queue(WAITING_STEPS)
        self._jobs.put(partial(self._writes.add, TOKENS_FILE, self._write_tokens))
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def write(
        self, step: int, columns: Callable[[], Mapping[str, list[Any]]], directory: str = DIRECTORY
    ) -> None:
        """Write the rollouts of a step soon. The thread calls `columns` for the values of each column.

        directory: one of DIRECTORIES.
        """
        self._raise_error()
        name = f"step {step}" if directory == DIRECTORY else f"{directory} of step {step}"
        write = partial(self._writes.add, name, lambda: self._write(step, columns(), directory))
        self._jobs.put(write)

    def flush(self) -> None:
        """Return once all data given to `write` is on disk, or the disk has rejected it."""
        self._jobs.put(self._writes.retry)
        self._jobs.join()
        self._raise_error()

    def close(self) -> None:
        self._jobs.put(self._writes.close)
        self._jobs.put(None)
        self._thread.join()
        self._raise_error()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except Exception as error:
                self._error = error
            finally:
                del job  # it holds the batch
                self._jobs.task_done()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, step: int, columns: Mapping[str, list[Any]], directory: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(dict(columns), schema=self._schema())
        path = self._run_dir / directory / f"step_{step:06d}.parquet"
        new = path.with_name(path.name + ".partial")
        self._fence()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, new, compression="zstd")
            self._fence()
            new.replace(path)  # readers and a resumed run see a whole file or none
        except OSError:
            new.unlink(missing_ok=True)  # its space is needed by other files
            raise

    def _write_tokens(self) -> None:
        path = self._run_dir / TOKENS_FILE
        new = path.with_name(path.name + ".partial")
        text = json.dumps(self._token_texts(), ensure_ascii=False)
        self._fence()
        new.write_text(text, encoding="utf-8")
        new.replace(path)
