"""Ctrl-C and SIGTERM: a run ends at once and in good order, and continues in the same bytes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
import torch
from instances import usual
from small_runs import small_config
from test_checkpoint import CASES, RUN, digest, scalars
from waiting import LIMIT, a_moment

from torchrl_llm.modules.adapters import FusedLora
from torchrl_llm.runs import build_run, verify
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.utils import interrupts
from torchrl_llm.utils.interrupts import (
    Interrupted,
    catch_signals,
    children_ignore_sigint,
    held,
    interruptible,
    run_begins,
)

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("interrupted_script.py")
CODES = {"SIGINT": 130, "SIGTERM": 143}
RAYS_OWN = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\t(INFO|WARNING) ")


def interrupt(signum=signal.SIGINT):
    os.kill(os.getpid(), signum)
    return True


@pytest.fixture(autouse=True, scope="module")
def handlers():
    """Python's own, also for processes that are started: a shell starts what runs in its background
    with SIGINT ignored."""
    given = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in given.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class TestInterruptible:
    def test_what_may_be_dropped_is_left_at_once_and_the_handlers_come_back(self, capfd):
        reached, before = [], signal.getsignal(signal.SIGTERM)
        with pytest.raises(Interrupted) as interrupted, catch_signals("again"):
            interruptible(lambda: (run_begins(), reached.append(1), interrupt(signal.SIGTERM), reached.append(2)))
        assert reached == [1]
        assert interrupted.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert capfd.readouterr().err.splitlines()[-1] == "interrupted by SIGTERM; go on with: again"

    def test_all_else_goes_on_to_the_next_such_place(self):
        def work():
            interrupt()
            reached.append(1)
            interruptible(lambda: reached.append(2))
            reached.append(3)

        reached = []
        with pytest.raises(Interrupted), catch_signals(""):
            work()
        assert reached == [1]

    def test_or_to_the_end(self):
        with pytest.raises(Interrupted), catch_signals(""), catch_signals("inner"):
            interrupt()

    def test_what_fails_after_the_signal_fails_for_it(self):
        def fails(signalled):
            try:
                if signalled:
                    interrupt()
            finally:
                raise RuntimeError("the engine died")

        with pytest.raises(RuntimeError, match="died"), catch_signals(""):
            interruptible(lambda: fails(False))
        with pytest.raises(Interrupted), catch_signals(""):
            interruptible(lambda: fails(True))

    def test_what_is_held_is_left_at_its_places_only(self):
        def work():
            try:
                with held() as leave_if_asked:
                    interrupt()
                    reached.append("held")
                    leave_if_asked()
                    reached.append("left too late")
            finally:
                reached.append("put back")

        def to_the_end():
            with held():
                interrupt()
                reached.append("whole")
            reached.append("behind")

        for function, expected in ((work, ["held", "put back"]), (to_the_end, ["whole"])):
            reached = []
            with pytest.raises(Interrupted), catch_signals(""):
                interruptible(function)
            assert reached == expected

    def test_elsewhere_it_does_nothing(self):
        def work():
            with catch_signals(""):
                results.append((signal.getsignal(signal.SIGINT), interruptible(lambda: "ran")))

        results = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert results == [(signal.default_int_handler, "ran")]
        with pytest.raises(KeyboardInterrupt):
            interruptible(interrupt)

    def test_what_the_process_ignores_it_goes_on_to_ignore(self):
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with catch_signals(""):
                interrupt()
                assert interruptible(lambda: "ran") == "ran"
        finally:
            signal.signal(signal.SIGINT, old)

    def test_the_echo_of_a_launcher_is_no_second_one(self, monkeypatch):
        monkeypatch.setattr(interrupts, "_ECHO", LIMIT)
        with pytest.raises(Interrupted), catch_signals(""):
            all(map(interrupt, (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)))

    @pytest.mark.parametrize("name", CODES)
    def test_a_second_one_ends_the_process_where_it_stands(self, name):
        code = (
            "import os, signal, time\n"
            "from torchrl_llm.utils import interrupts\n"
            "interrupts._ECHO = 0.01\n"
            "with interrupts.catch_signals(''):\n"
            f"    os.kill(os.getpid(), signal.{name})\n"
            "    time.sleep(0.05)\n"
            f"    os.kill(os.getpid(), signal.{name})\n"
            "    print('still here')\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False)
        assert (done.returncode, done.stdout) == (CODES[name], "")
        assert len(done.stderr.splitlines()) == 1, done.stderr

    def test_children_can_be_terminated_and_leave_ctrl_c_to_the_parent(self):
        with catch_signals(""):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIMIT,))
            child.start()
            os.kill(child.pid, signal.SIGINT)
            a_moment()
            assert child.is_alive()
            child.terminate()
            child.join(LIMIT)
        assert child.exitcode == -signal.SIGTERM

    def test_other_processes_started_inside_do_not_get_it_either(self):
        code = "import signal; print(int(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
        with children_ignore_sigint():
            inside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert (inside.stdout, outside.stdout) == ("1\n", "0\n")


class TestTrainer:
    """In this process: what is dropped leaves the run where it was before."""

    def stop(self, owner, name, call):
        """Interrupt the ``call``-th call of a method, when it has done its work."""
        method, left = getattr(owner, name), call

        def interrupted(*args, **kwargs):
            nonlocal left
            left -= 1
            result = method(*args, **kwargs)
            if left == 0:
                interrupt()
            return result

        setattr(owner, name, interrupted)

    def config(self, folder, case, **more):
        algo, settings = CASES[case]
        return small_config(folder, algo, **RUN | settings | {"max_iterations": 4, "checkpoint_interval": 9} | more)

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory):
        """Of a case: weights, optimizer and metrics of the run that was left alone."""

        @cache
        def play(case):
            folder = tmp_path_factory.mktemp("whole")
            run = build_run(self.config(folder, case))
            run.trainer.train()
            return digest(run), scalars(folder / "run")

        return play

    @pytest.mark.parametrize(
        ("case", "part", "name", "call"),
        usual(
            [
                (0, "policy", "generate", 6),
                (0, "trainer", "update", 3),
                (0, "trainer", "evaluator", 1),
                (0, "evaluation_env", "step", 2),
                (0, "checkpoints", "save", 1),
                (0, "trainer", "_log", 4),
                (4, "replay_buffer", "extend", 4),
                (5, "policy", "generate", 6),
            ]
        ),
        ids=str,
    )
    def test_it_goes_on_in_the_same_bytes(self, tmp_path, whole, case, part, name, call):
        expected = whole(case)
        run = build_run(self.config(tmp_path / "cut", case))
        self.stop(getattr(run if hasattr(run, part) else run.trainer, part), name, call)
        with pytest.raises(Interrupted):
            run.trainer.train()
        assert run.trainer.stop_reason in (None, "max_iterations=4")
        saved = run.checkpoints.latest()
        assert verify(saved)["metadata"]["iteration"] == run.trainer.iteration
        again = build_run(self.config(tmp_path / "cut", case, resume=True))
        again.trainer.train()
        assert (digest(again), scalars(tmp_path / "cut" / "run")) == expected

    @pytest.mark.extra
    def test_an_evaluation_that_is_made_up_for_is_logged_once(self, tmp_path):
        """Also if the run is killed after it, and before it is saved."""
        run = build_run(self.config(tmp_path, 0))
        self.stop(run.trainer, "evaluator", 1)
        with pytest.raises(Interrupted):
            run.trainer.train()
        killed = build_run(self.config(tmp_path, 0, resume=True))
        killed.trainer.save_if_due = None
        with pytest.raises(TypeError):
            killed.trainer.train()
        build_run(self.config(tmp_path, 0, resume=True)).trainer.train()
        rows = [row for row in read_metrics(tmp_path / "run" / "metrics.csv") if "evaluation/success" in row]
        assert len(rows) == len({row["rollout/steps"] for row in rows}) == 2

    def test_layers_that_a_policy_exchanges_are_back_when_the_run_is_saved(self, tmp_path, monkeypatch):
        """The signal comes while they are put back, one by one."""

        class Places(list):
            times = 0

            def __iter__(self):
                self.times += 1
                for i, place in enumerate(super().__iter__()):
                    if (self.times, i) == (8, 1):
                        interrupt()
                    yield place

        run = build_run(self.config(tmp_path, 2))
        fused, session = FusedLora.in_place, Places()

        def in_place(this):
            session[:] = this._places
            this._places = session
            return fused(this)

        layers = list(run.models.model.modules())
        monkeypatch.setattr(FusedLora, "in_place", in_place)
        with pytest.raises(Interrupted):
            run.trainer.train()
        assert session.times == 8
        assert [id(layer) for layer in run.models.model.modules()] == [id(layer) for layer in layers]

    def test_without_checkpoints_it_says_so(self, tmp_path, capfd):
        run = build_run(small_config(tmp_path, max_iterations=3))
        self.stop(run.policy, "generate", 5)
        with pytest.raises(Interrupted):
            run.trainer.train()
        assert "nothing is saved (save_checkpoints=False)" in capfd.readouterr().err


SETTINGS = {
    "config": ROOT / "examples" / "configs" / "tiny_ppo_llm.yaml",
    "num-envs": 8,
    "batch-size": 8,
    "minibatch-size": 4,
    "evaluation-interval": 2,
    "checkpoint-interval": 3,
    "evaluation-episodes": 8,
    "final-episodes": 8,
    "max-steps": 2000,
    "progress": "false",
}
DELAYS = {
    "build": 0.5,
    "before": 0.2,
    "rollout": 0.15,
    "update": 0.3,
    "evaluation": 0.15,
    "save": 0.05,
    "after": 0.02,
}
"""Seconds that a phase takes, about."""

ORDER = ("before", "rollout", "evaluation", "update", "save", "rollout", "build", "evaluation", "update", "after")
"""The phases of ten moments; fewer take the second and those behind it."""


def moments(count: int, seed: int, to: str) -> list[str]:
    """Moments of a run, each at a random call and time of a phase."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for i, phase in enumerate(ORDER if count >= len(ORDER) else ORDER[1 : count + 1]):
        chance, call = torch.rand(2, generator=generator).tolist()
        call = 1 if phase in ("build", "before", "after") else 1 + int(2 * call)
        result.append(f"{phase}:{call}:{chance * DELAYS[phase]:.4f}:{('SIGINT', 'SIGTERM')[i % 2]}:{to}")
    return result


def play(script: str, folder: Path, moment: str, *launch: str, iterations: int, **settings: object):
    """A process of the run; it continues where it was stopped."""
    command = [sys.executable, *launch, str(SCRIPT), moment, str(ROOT / "examples" / script)]
    for name, value in {**SETTINGS, "max-iterations": iterations, "output-dir": folder, **settings}.items():
        command += [f"--{name}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--resume"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


SAMPLED = ("log_prob_gap", "parity_gap", "first_turn_entropy")
"""What depends on the log-probs of workers, and these in their last digit on which turns they
answer together."""


def ended(folder: Path, without: Collection[str] = ()) -> tuple:
    """What two runs that are the same have in common."""
    last = folder / "checkpoints" / "last"
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.glob("*/*.safetensors"))]
    result = json.loads((folder / "result.json").read_text())
    logged = {name: cells for name, cells in scalars(folder).items() if not name.endswith((*without,))}
    return sums, [result[name] for name in ("success_after", "reward_after", "iterations", "stop_reason")], logged


def check_end(folder: Path, moment: str, done: tuple[int, str, str], *, launched: bool = False) -> None:
    """An interrupted run has ended in good order."""
    code, _, err = done
    name = moment.split(":")[3]
    ours = [line for line in err.splitlines() if line.startswith("interrupted by ")]
    assert len(ours) == 1, (moment, code, err[-4000:])
    assert ours[0].startswith(f"interrupted by {name}"), ours
    assert ours[0].endswith("as it was started" if moment.startswith("build") else "--resume"), ours
    if not launched:  # a launcher has a traceback and an exit code of its own
        assert code == CODES[name], (moment, err)
        assert "Traceback" not in err, err
        assert len([line for line in err.splitlines() if not RAYS_OWN.match(line)]) == 2, err
    if not moment.startswith("build"):
        result = json.loads((folder / "result.json").read_text())
        assert result["stop_reason"] == f"interrupted by {name}"


COUNT = int(os.environ.get("INTERRUPTS", "0"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestScript:
    """The real script, in processes of its own; ``make test-interrupt`` takes ten moments of
    each."""

    def compare(self, tmp_path, script, found, *launch, without=(), **settings):
        iterations = 3 + 2 * len(found)
        for moment in found:
            done = play(script, tmp_path / "cut", moment, *launch, iterations=iterations, **settings)
            check_end(tmp_path / "cut", moment, done, launched=bool(launch))
        for name in ("cut", "whole"):
            code, _, err = play(script, tmp_path / name, "never", *launch, iterations=iterations, **settings)
            assert code == 0, err[-4000:]
        assert ended(tmp_path / "cut", without) == ended(tmp_path / "whole", without)

    @pytest.mark.extra
    def test_alone(self, tmp_path):
        self.compare(tmp_path, "multiturn.py", [*moments(COUNT or 1, 1, "self"), "after:1:0.01:SIGINT:group"])

    @pytest.mark.extra
    @pytest.mark.parametrize("to", ["parent", "self"] if COUNT else ["parent"])
    def test_two_ranks(self, tmp_path, to):
        """The signal comes by the launcher, or to each rank at its own time."""
        config = ROOT / "examples" / "configs" / "accelerate_ddp.yaml"
        launch = ("-m", "accelerate.commands.launch", "--config_file", str(config))
        found = [moment for moment in moments(COUNT or 1, 2, to) if not moment.startswith("build")]
        self.compare(tmp_path, "multiturn.py", found, *launch)

    @pytest.mark.ray
    def test_ray_workers(self, tmp_path):
        """The terminal sends the signal to every process, Ray's included."""
        pytest.importorskip("ray", reason="needs Ray: run make test-scale")
        settings = {"ray-workers": 1, "config": ROOT / "examples" / "configs" / "tiny_reinforce_llm.yaml"}
        settings["old-log-probs"] = "scorer"
        # A terminal knows no SIGTERM: who sends it to Ray's own processes too has ended the
        # cluster.
        found = [moment.replace("SIGTERM:group", "SIGTERM:self") for moment in moments(COUNT or 1, 3, "group")]
        self.compare(tmp_path, "multiturn_ray.py", found, without=SAMPLED, **settings)
