"""Plant faults that reviews and earlier work found, one at a time: the tests of ``make test`` must
find each.

    python tests/planted_faults.py [NAME ...]

Works on a copy of the checkout. Each fault names the test files that are there to find it, so that
a round takes seconds; they are run without the fault first. Exits with 1 if a fault stays
unnoticed, is no longer in the code, or if a test fails without it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A line of the package that is replaced.

    Attributes:
        path: the file, in ``torchrl_llm``.
        right: what stands there, once.
        wrong: what is put there.
        tests: what is run to find it: files of tests, or tests in them.
    """

    path: str
    right: str
    wrong: str
    tests: str


FAULTS = {
    "lambda is ignored": Fault(
        "functional/credit.py",
        "torch.where(acted, gamma * lmbda, idle)",
        "torch.where(acted, gamma, idle)",
        "tests/objectives/test_functional_credit.py",
    ),
    "a gap between turns is discounted": Fault(
        "functional/returns.py",
        "before = (mask.cumsum(1) - mask.long()).double()",
        "before = torch.arange(mask.shape[1]).expand_as(mask).double()",
        "tests/objectives/test_functional_credit.py",
    ),
    "a turn is paid at its first token": Fault(
        "functional/edges.py",
        'target = edge_positions(turn_ids, num_turns, "last")',
        'target = edge_positions(turn_ids, num_turns, "first")',
        "tests/objectives/test_functional_credit.py",
    ),
    "the optimistic bound is taken": Fault(
        "functional/surrogate.py",
        "objective = torch.minimum(ratio * advantage",
        "objective = torch.maximum(ratio * advantage",
        "tests/objectives/test_functional_surrogate.py",
    ),
    "the KL's direction": Fault(
        "functional/surrogate.py",
        "d = wide(ref_log_prob) - wide(log_prob)",
        "d = wide(log_prob) - wide(ref_log_prob)",
        "tests/objectives/test_functional_surrogate.py",
    ),
    "an empty episode counts in the loss weights": Fault(
        "functional/surrogate.py",
        "sizes, units = turn_to_token(lengths, unit_ids), (lengths > 0).sum(1)",
        "sizes, units = turn_to_token(lengths, unit_ids), torch.ones_like(lengths).long().sum(1)",
        "tests/objectives/test_functional_surrogate.py",
    ),
    "a custom objective is never called": Fault(
        "objectives/loss.py",
        "self.objective(log_ratio, advantage), log_ratio)",
        "self.surrogate(log_ratio, advantage)[0], log_ratio)",
        "tests/objectives/test_losses.py",
    ),
    "a long step is kept": Fault(
        "trainers/trust_region.py",
        "share = 1.0 if self._kl <= self.target else self._shorten()",
        "share = 1.0",
        "tests/trainers/test_trust_region.py",
    ),
    "a step is measured on the next minibatch alone": Fault(
        "trainers/trust_region.py",
        "        self._kl = self.kl()\n        # Not",
        "        self._kl = kl.item() if kl is not None else 0.0\n        # Not",
        "tests/trainers/test_trust_region.py",
    ),
    "the bound is on each step and not on the update": Fault(
        "trainers/trust_region.py",
        "        self._open += 1\n",
        "        self._open += 1\n"
        "        self._old = data.apply_in_micro_batches(self._actor, self._rows.copy(), 10**6)[keys.LOG_PROB]\n",
        "tests/trainers/test_trust_region.py",
    ),
    "the entropy bonus has no bound": Fault(
        "objectives/base.py",
        "paid = entropy if self.entropy_bound is None else",
        "paid = entropy if True else",
        "tests/objectives/test_losses.py",
    ),
    "a run trains the stock loss": Fault(
        "runs/assembly.py",
        "loss = (given.make_loss or build.make_objective)(config, networks.models)",
        "loss = build.make_objective(config, networks.models)",
        "tests/examples/test_examples.py::TestCustomLoss",
    ),
    "the loss is a mean of its micro-batches": Fault(
        "objectives/loss.py",
        '{"loss_objective": -gain.sum()}',
        '{"loss_objective": -gain.sum() / turn_ids.shape[0]}',
        "tests/objectives/test_loss_splitting.py",
    ),
    "the KL in the reward is lost": Fault(
        "objectives/joining.py",
        'penalty = loss.kl_coeff if loss.kl_in == "reward" else 0.0',
        "penalty = 0.0",
        "tests/objectives/test_algorithms.py",
    ),
    "the first token of a response is not an action": Fault(
        "data/rows.py",
        "row[keys.TURN_IDS][place] = number",
        "row[keys.TURN_IDS][place.start + 1 : place.stop] = number",
        "tests/data",
    ),
    "a changed history is accepted": Fault(
        "data/rows.py",
        "if not np.array_equal(row[keys.TOKENS][place], turn.tokens):",
        "if False:",
        "tests/data",
    ),
    "gradients of two processes are averaged": Fault(
        "trainers/distributed.py",
        "self.accelerator.backward(loss * self.world_size)",
        "self.accelerator.backward(loss)",
        "tests/runs/test_ranks.py::TestReplayed",
    ),
    "contexts of the old weights are used": Fault(
        "modules/hf/policy.py",
        "super().weights_changed(version)\n        self.drop_cache()",
        "super().weights_changed(version)",
        "tests/modules/test_hf_cache.py",
    ),
    "the reference runs under the trained adapter": Fault(
        "modules/adapters.py",
        "with _switched(layers, [_wanted(layer, adapter) for layer in layers]):",
        'with _switched(layers, [_wanted(layer, adapter or "actor") for layer in layers]):',
        "tests/modules/test_actor_critic.py",
    ),
    "the group of a failed episode is trained on": Fault(
        "collectors/_queue.py",
        "self.drop(episode.group_id, fault.reason)",
        "self.dropped[fault.reason] += 1\n        del self.episodes[episode.episode_id]",
        "tests/collectors/test_async_faults.py",
    ),
    "those that finish first are the batch": Fault(
        "collectors/_queue.py",
        "            if not self._has_finished(size):\n                return None\n"
        "            batch = [*islice(self.episodes.values(), size)]\n",
        "            batch = [each for each in self.episodes.values() if each.finished][:size]\n"
        "            if len(batch) < size:\n                return None\n",
        "tests/collectors/test_async_staleness.py",
    ),
    "stale episodes are trained on": Fault(
        "collectors/_queue.py",
        "oldest = version - max_staleness",
        "oldest = version - max_staleness - 1",
        "tests/collectors/test_queue.py",
    ),
    "an environment changes the global generator": Fault(
        "envs/isolation.py",
        "random.setstate(python)",
        "pass",
        "tests/envs/test_isolation.py",
    ),
    "a resume forgets the random generators": Fault(
        "runs/checkpoint.py",
        'states = {**self.components, **shared, "rng": GlobalRNGState(), "trainer": trainer}',
        'states = {**self.components, **shared, "trainer": trainer}',
        "tests/runs/test_checkpoint.py",
    ),
    "files of others are deleted with a checkpoint": Fault(
        "runs/checkpoint.py",
        "foreign = files.foreign_files(path)\n        if foreign:",
        "foreign = files.foreign_files(path)\n        if False:",
        "tests/runs/test_run_folder.py",
    ),
    "entropy of excluded tokens is NaN": Fault(
        "modules/scorer.py",
        "finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0) if masked else log_probs",
        "finite = log_probs",
        "tests/modules/test_scorer.py",
    ),
    "an index is made on the host": Fault(
        "modules/positions.py",
        "places = torch.arange(mask.shape[1], device=mask.device)",
        "places = torch.arange(mask.shape[1])",
        "tests/gpu_laws/test_laws.py",
    ),
    "noise stays on the host": Fault(
        "modules/hf/policy.py",
        "self._noise = None if noise is None else noise.to(device)",
        "self._noise = noise",
        "tests/gpu_laws/test_laws.py",
    ),
    "an index of the cache is made on the host": Fault(
        "modules/hf/_kv_cache.py",
        "head = torch.arange(heads, device=storage.device)",
        "head = torch.arange(heads)",
        "tests/gpu_laws/test_laws.py",
    ),
    "numpy reads a tensor of the device": Fault(
        "modules/prefix_attention.py",
        "plan_prefixes(tokens.cpu().numpy(), lengths.cpu().numpy()",
        "plan_prefixes(tokens.numpy(), lengths.numpy()",
        "tests/gpu_laws/test_laws.py",
    ),
    "a generator of the host draws on the device": Fault(
        "data/batching.py",
        "torch.randperm(count, generator=generator)",
        "torch.randperm(count, generator=generator, device=batch.device)",
        "tests/gpu_laws/test_laws.py",
    ),
    "autocast is the host's": Fault(
        "trainers/update.py",
        "with self.distributed.accelerator.autocast():",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "tests/gpu_laws/test_laws.py",
    ),
    "the value head stays on the host": Fault(
        "modules/critic.py",
        "nn.Linear, width, 1, dtype=dtype, device=weight.device",
        "nn.Linear, width, 1, dtype=dtype",
        "tests/modules/test_actor_critic_memory.py::TestOffload",
    ),
    "each token waits for the device": Fault(
        "modules/hf/policy.py",
        "        self._index += 1\n",
        "        self._index += 1\n        ids.tolist()\n",
        "tests/gpu_laws/test_laws.py",
    ),
    "rows stay on the host": Fault(
        "trainers/trainer.py",
        "        batch = self.distributed.on_device(batch)\n",
        "",
        "tests/gpu_laws/test_laws.py",
    ),
    "the index of turns is made on the host": Fault(
        "functional/edges.py",
        "position = torch.arange(length, device=turn_ids.device)",
        "position = torch.arange(length)",
        "tests/gpu_laws/test_laws.py",
    ),
    "cuDNN is left on": Fault(
        "modules/kernels.py",
        "cuda.enable_cudnn_sdp(False)",
        "cuda.enable_cudnn_sdp(_found[0])",
        "tests/gpu_laws/test_laws.py",
    ),
    "PyTorch keeps its memory when an engine wakes": Fault(
        "modules/vllm/start.py",
        "    gc.collect()  # what only cycles hold would stay\n    torch.cuda.empty_cache()\n",
        "    gc.collect()\n",
        "tests/modules/test_vllm_weights.py",
    ),
}
"""What was wrong once, or could be, and looks right in shape."""


def run(checkout: Path, tests: str) -> int:
    """The exit code of pytest: 0 passed, 1 failed; another one is an error of the script or of the
    tests."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not extra", "--timeout=600", *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


def try_fault(checkout: Path, fault: Fault) -> str:
    """Plant a fault, run its tests and take it out again; returns what is wrong with the tests, if
    anything."""
    path = checkout / "torchrl_llm" / fault.path
    text = path.read_text()
    if text.count(fault.right) != 1:
        return f"{fault.path} has {fault.right!r} {text.count(fault.right)} times; expected once: bring the fault up to date"
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        code = run(checkout, fault.tests)
    finally:
        path.write_text(text)
    return "" if code == 1 else f"pytest {fault.tests} ended with {code}; expected 1, a test that fails"


def main() -> int:
    names = sys.argv[1:] or [*FAULTS]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        skipped = shutil.ignore_patterns(".git", ".venv*", "_build", "__pycache__")
        # Only the folder of results in the checkout: the package and its tests have a folder of
        # that name.
        shutil.copytree(
            ROOT, checkout, ignore=lambda at, names: {*skipped(at, names), *(["runs"] if at == str(ROOT) else [])}
        )
        tests = " ".join(dict.fromkeys(FAULTS[name].tests for name in names))
        if run(checkout, tests) != 0:
            print(f"without a fault: pytest {tests} does not pass")
            return 1
        for name in names:
            problem = try_fault(checkout, FAULTS[name])
            wrong += bool(problem)
            print(f"{'NOT FOUND' if problem else 'found':9}  {name}{': ' if problem else ''}{problem}", flush=True)
    print(f"{len(names) - wrong} of {len(names)} faults found")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
