"""``python grpo_step.py FOLDER``: an iteration of GRPO on eight rows of about 360 tokens. Prints
JSON: lengths and peak memory."""

import json
import resource
import sys
from pathlib import Path

from talks import LongTalk, config

from torchrl_llm import keys
from torchrl_llm.runs import build_run
from torchrl_llm.trainers.callbacks import Callback


class Lengths(Callback):
    """Keeps the tokens of each row of the last batch."""

    def on_batch(self, trainer, rows, metrics):
        self.lengths = rows[keys.ATTENTION_MASK].sum(-1).tolist()


if __name__ == "__main__":
    # Each row is computed whole, as where no two share anything; max_tokens is the default on a
    # CPU.
    settings = {"num_envs": 8, "batch_size": 8, "group_size": 4, "share_prefixes": False, "save_checkpoints": False}
    settings["max_tokens"] = 2048
    watch = Lengths()
    run = build_run(config(Path(sys.argv[1]), **settings, max_iterations=1), env=LongTalk, callbacks=[watch])
    run.trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"lengths": watch.lengths, "peak": peak}))
