"""A search on Ray Tune: :func:`tune`. Schedulers and searchers are Ray Tune's; a trial is
:mod:`torchrl_llm.tuning.trial`.

Ray Tune keeps what it knows in ``output_dir/ray``, with a copy of each trial's run after each
generation as its checkpoint. The runs themselves are in ``output_dir/trials``. On a cluster all
machines need this folder at the same place.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_llm.runs.outputs import write_json
from torchrl_llm.runs.settings import ModelSettings, names_of
from torchrl_llm.tuning.results import FILE, TRIALS, check_same, identity
from torchrl_llm.tuning.search_space import Dimension, TuningConfig
from torchrl_llm.tuning.trial import copy_run, put_back, train_generation
from torchrl_llm.utils.optional import import_extra
from torchrl_llm.utils.options import ConfigError

_STATE, _NAME = "ray", "search"
_RUN = "run"
"""The folder of a checkpoint of Ray Tune that holds the run: Ray Tune has files of its own beside
it."""

# Workers stay in the folder of the driver, because relative paths in the base settings count from
# there; and a trial that uses more threads than it asked Ray for slows the others down.
_ENVIRONMENT = {"RAY_CHDIR_TO_TRIAL_DIR": "0"}


def import_tune() -> Any:
    """The module ``ray.tune``.

    Raises:
        MissingExtraError: it is not installed; the message says how to.
    """
    return import_extra("ray.tune", extra="tune", what="Tuning")


def tune(tuning: TuningConfig, *, resume: bool = False, trust: bool = False, address: str | None = None) -> Any:
    """Run the search, or continue one that was stopped or killed.

    Args:
        tuning: what is searched.
        resume: continue the search in ``tuning.output_dir``; if there is none, start it.
        trust: the search in ``tuning.output_dir`` is one's own, so that its pickles may be read,
            which can run any code. Ray Tune keeps what it knows in no other form.
        address: of a Ray cluster, such as ``"auto"``; ``None``: a Ray of this process alone, or the
            one that it has started.

    Returns:
        Ray Tune's ``ResultGrid``.

    Raises:
        MissingExtraError: Ray Tune is not installed.
        ConfigError: the folder holds another search, or one that is to be resumed without trust, or
            the machines have too little for one trial.
    """
    place, found = tuning.output_dir / _STATE / _NAME, tuning.output_dir / FILE
    if resume and place.exists() and not trust:
        raise ConfigError(
            f"Ray Tune continues the search in {tuning.output_dir} from pickles there, which can run any code: if the folder is your "
            "own, add --trust (in Python, tune(..., trust=True)). To search again, choose another output_dir."
        )
    ray_tune = import_tune()
    if found.exists():
        if not resume:
            raise ConfigError(
                f"{tuning.output_dir} holds a search already: --resume --trust continues it, or choose another output_dir."
            )
        check_same(tuning, json.loads(found.read_text()))
    with _running_ray(tuning, address), _seeded(tuning.seed):
        if not ray_tune.Tuner.can_restore(place):
            tuning.output_dir.mkdir(parents=True, exist_ok=True)
            write_json(identity(tuning), found)
            return _tuner(ray_tune, tuning).fit()
        trainable, space = _resources(ray_tune, tuning), _domains(tuning)
        return ray_tune.Tuner.restore(str(place), trainable, resume_errored=True, param_space=space).fit()


def _tuner(ray_tune: Any, tuning: TuningConfig) -> Any:
    basic = import_extra("ray.tune.search.basic_variant", extra="tune", what="Tuning")
    scheduler = {"pbt": _population, "asha": _halving, "random": lambda tuning: None}[tuning.scheduler](tuning)
    pbt = tuning.scheduler == "pbt"
    return ray_tune.Tuner(
        _resources(ray_tune, tuning),
        param_space=_domains(tuning),
        tune_config=ray_tune.TuneConfig(
            metric=tuning.metric,
            mode="max",
            num_samples=tuning.trials,
            trial_dirname_creator=_name,
            scheduler=scheduler,
            search_alg=basic.BasicVariantGenerator(random_state=tuning.seed),
            # Each new process takes seconds to import PyTorch. How a model computes is fixed for a
            # process, though: accelerate keeps one mixed precision.
            reuse_actors=tuning.dimensions.keys().isdisjoint(names_of(ModelSettings)),
        ),
        run_config=ray_tune.RunConfig(
            name=_NAME,
            storage_path=str(tuning.output_dir / _STATE),
            stop={"training_iteration": tuning.generations},
            failure_config=ray_tune.FailureConfig(max_failures=tuning.max_failures),
            # A population is paused after each generation, which saves it anyway. Three are kept,
            # because a trial may be copied a generation after its copy was chosen.
            checkpoint_config=ray_tune.CheckpointConfig(num_to_keep=3, checkpoint_frequency=0 if pbt else 1),
            verbose=0,
        ),
    )


def _resources(ray_tune: Any, tuning: TuningConfig) -> Any:
    resources = {"cpu": tuning.cpus_per_trial, "gpu": tuning.gpus_per_trial}
    return ray_tune.with_resources(trial_class(tuning), resources)


def trial_class(tuning: TuningConfig) -> type:
    """Ray Tune's ``Trainable`` of a search: a step is a generation, a checkpoint is a copy of the
    run."""
    trainable: Any = import_tune().Trainable

    class Trial(trainable):
        """A run in ``output_dir/trials``."""

        def step(self) -> dict[str, float]:
            return train_generation(tuning, self.folder, self.config, self.iteration + 1)

        @property
        def folder(self) -> Path:
            return tuning.output_dir / TRIALS / _name(self)

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            copy_run(self.folder, Path(checkpoint_dir) / _RUN)

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            put_back(Path(checkpoint_dir) / _RUN, self.folder)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            # nothing is kept between two steps: this process can go on as another trial
            return True

    return Trial


def _name(trial: Any) -> str:
    """The number of a trial, which is the same in every search: Ray Tune puts letters before it
    that are not."""
    return trial.trial_id.rpartition("_")[2]


def _domains(tuning: TuningConfig) -> dict[str, Any]:
    ray_tune = import_tune()
    made = {"loguniform": ray_tune.loguniform, "uniform": ray_tune.uniform}
    return {
        name: ray_tune.choice([*each.values]) if each.kind == "choice" else made[each.kind](*each.values)
        for name, each in tuning.dimensions.items()
    }


def _population(tuning: TuningConfig) -> Any:
    """Ray Tune's ``PopulationBasedTraining``, in step: a generation begins when all trials have
    ended the one before."""
    scheduler: Any = import_extra("ray.tune.schedulers", extra="tune", what="Tuning").PopulationBasedTraining

    class Population(scheduler):
        """Takes up a search that is restored. Ray Tune saves the trials of a search and not its
        scheduler, which would wait for generations that are over, for ever (Ray 2.60)."""

        def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
            super().on_trial_add(tune_controller, trial)
            state, last = self._trial_state[trial], trial.last_result
            if "training_iteration" in last:
                self._save_trial_state(state, last["training_iteration"], last, trial)
                state.last_perturbation_time = state.last_train_time
            self._next_perturbation_sync = 1 + min(each.last_train_time for each in self._trial_state.values())

    # Values of a choice are given as a list: Ray Tune multiplies the values of a domain.
    mutations = {n: [*d.values] if d.kind == "choice" else _domains(tuning)[n] for n, d in tuning.dimensions.items()}
    return Population(
        time_attr="training_iteration",
        perturbation_interval=1,
        hyperparam_mutations=mutations,
        custom_explore_fn=partial(_within, tuning.dimensions),
        synch=True,
    )


def _within(dimensions: Mapping[str, Dimension], sampled: dict[str, Any]) -> dict[str, Any]:
    """Perturbed values, within the bounds of the space: perturbing multiplies, and leaves them."""
    return {name: dimensions[name].clip(value) for name, value in sampled.items()}


def _halving(tuning: TuningConfig) -> Any:
    schedulers = import_extra("ray.tune.schedulers", extra="tune", what="Tuning")
    return schedulers.ASHAScheduler(time_attr="training_iteration", max_t=tuning.generations, grace_period=1)


@contextmanager
def _running_ray(tuning: TuningConfig, address: str | None) -> Iterator[None]:
    """Inside, Ray runs; a Ray that is started here is stopped at the end."""
    ray = import_extra("ray", extra="tune", what="Tuning")
    started = not ray.is_initialized()
    if started:
        threads = {"OMP_NUM_THREADS": str(max(1, int(tuning.cpus_per_trial)))}
        ray.init(
            address or "local",
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            runtime_env={"env_vars": {**_ENVIRONMENT, **threads}},
        )
    try:
        found = ray.cluster_resources()
        for name, wanted in (("CPU", tuning.cpus_per_trial), ("GPU", tuning.gpus_per_trial)):
            if found.get(name, 0) < wanted:
                raise ConfigError(
                    f"A trial asks for {wanted:g} {name}s, and Ray has {found.get(name, 0):g} in all: lower {name.lower()}s_per_trial."
                )
        yield
    finally:
        if started:
            ray.shutdown()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the generators that Ray Tune's schedulers draw from have a seed; after it they are as
    they were."""
    states, before = (random.getstate(), np.random.get_state()), dict(os.environ)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for name in _ENVIRONMENT:
            os.environ.pop(name) if name not in before else os.environ.update({name: before[name]})
