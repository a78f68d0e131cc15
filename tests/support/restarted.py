"""A training of two ranks, one of which is killed once, for launchers that start processes again:

    torchrun --standalone --nproc-per-node 2 --max-restarts 2 tests/support/restarted.py FOLDER '{"max_steps": 5, ...}'

Rank 0 of the run that comes to an end writes its log to FOLDER/result.json.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # launchers put the folder of the script there

from transformers import TrainerCallback

import hf_burst
from tests.support.trainers import Case, make_trainer

FIRST = "first"  # a file in the folder, until the kill


class KilledOnce(TrainerCallback):
    """Ends rank 1 within the third step."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / FIRST

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 1 and self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1])
    trainer = make_trainer(Case(), str(folder), **json.loads(sys.argv[2]))
    trainer.add_callback(hf_burst.BurstResume())
    trainer.add_callback(KilledOnce(folder))
    start = hf_burst.last_checkpoint(str(folder))
    trainer.train(resume_from_checkpoint=start)
    if trainer.args.process_index == 0:
        result = {"start": start and Path(start).name, "log": trainer.state.log_history}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
