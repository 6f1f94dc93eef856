"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv): a class in this process, or a
server that runs.

``openenv:package.module:Class`` makes the class here; ``openenv:http://host:port`` is a session of
a server. A response is one text field of an action, and a message is one text field of an
observation.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import urlopen

from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentUnavailableError, UnknownEnvironmentError
from torchrl_llm.utils.optional import import_extra
from torchrl_llm.utils.options import ConfigError

__all__ = ["Backend", "OpenEnvironment", "resolve_openenv"]

_SCHEMES = ("http", "https", "ws", "wss")
_CONTAINER = (
    "One that is published as a container is started by itself (docker run -p 8000:8000 IMAGE); it is then "
    "openenv:http://localhost:8000."
)
_OWN = ("metadata", "done", "reward")
"""Fields that OpenEnv itself gives to every action or observation."""


def text_field(schema: Mapping[str, Any], chosen: str | None, option: str, env_id: str) -> str:
    """The field of an action or an observation that holds the text.

    Args:
        schema: JSON schema of the action or the observation.
        chosen: its name; ``None``: it has one only.
        option: the option that chooses, for the message.
        env_id: for the message.

    Raises:
        ConfigError: there is no such field, or none is chosen and there are several or none.

    Examples:
        >>> text_field({"properties": {"reply": {"type": "string"}, "done": {"type": "boolean"}}}, None, "observation", "openenv:x:Y")
        'reply'
    """
    fields = {name: each for name, each in schema.get("properties", {}).items() if name not in _OWN}
    texts = [name for name, each in fields.items() if each.get("type") == "string"]
    if chosen is None and len(texts) == 1:
        return texts[0]
    if chosen is not None and chosen in texts:
        return chosen
    given = f"{option}={chosen!r}" if chosen is not None else f"no option {option!r}"
    raise ConfigError(
        f"The environment {env_id!r} has {given}; expected one of its text fields {texts} (all fields: {[*fields]})."
    )


def _check_required(schema: Mapping[str, Any], sent: set[str], env_id: str) -> None:
    if missing := sorted(set(schema.get("required", ())) - sent):
        raise ConfigError(
            f"An action of {env_id!r} must have {missing}, beside the response: give them as the option action_fields, such as "
            f"{{{missing[0]}: ...}}, or write an environment of your own."
        )


class Backend(Protocol):
    """What an :class:`OpenEnvironment` talks to: an environment in this process, or a session of a
    server.

    Attributes:
        thread_safe: see :class:`~torchrl_llm.envs.TextEnv`.
        schemas: JSON schemas of its ``"action"`` and its ``"observation"``.
    """

    thread_safe: bool

    @property
    def schemas(self) -> Mapping[str, Any]: ...

    def reset(self, seed: int | None) -> tuple[Mapping[str, Any], float | None, bool]:
        """Start an episode; return the observation's fields, the reward and whether it is done."""

    def step(self, fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        """Send an action, given by its fields; return the same."""

    def close(self) -> None:
        """End it. Safe to call twice."""


class OpenEnvironment:
    """An environment of OpenEnv as a text environment.

    The reward is the observation's, 0 where it has none; ``done`` terminates the episode, and its
    last reward decides about success. OpenEnv knows no truncation: budgets are the setting
    ``max_turns``.

    Args:
        env_id: the id, for messages.
        backend: what it talks to.
        action: name of the action's field that is the response; default its only text field.
        observation: name of the observation's field that is the message; default its only text
            field.
        action_fields: constants for the action's other fields. Default none.

    Raises:
        ConfigError: a field is unknown or cannot be chosen.
    """

    def __init__(
        self,
        env_id: str,
        backend: Backend,
        *,
        action: str | None = None,
        observation: str | None = None,
        action_fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend, self._constants = backend, dict(action_fields or {})
        self.thread_safe = backend.thread_safe
        schemas = backend.schemas
        self._action = text_field(schemas["action"], action, "action", env_id)
        self._observation = text_field(schemas["observation"], observation, "observation", env_id)
        _check_required(schemas["action"], {self._action, *self._constants}, env_id)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the episode of ``seed``; what an environment makes of it is its own business."""
        observation, _, _ = self._backend.reset(seed)
        return self._text(observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send the response."""
        observation, reward, done = self._backend.step({**self._constants, self._action: action})
        return self._text(observation), float(reward or 0.0), bool(done), False, {}

    def close(self) -> None:
        """End the session. Safe to call twice."""
        self._backend.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        text = observation.get(self._observation)
        if not isinstance(text, str):
            raise TypeError(f"The observation's {self._observation!r} is {text!r:.50}; expected text.")
        return text


class _InProcess:
    """A class of OpenEnv's environments in this process."""

    thread_safe = False

    def __init__(self, maker: type, options: Mapping[str, Any], env_id: str) -> None:
        try:
            self._env = maker(**options)
        except Exception as error:  # whatever it needs: a container, a key, a file
            needs = f"Its class fails when it is made. {_CONTAINER}"
            raise EnvironmentUnavailableError(env_id, needs, error) from error
        hints = typing.get_type_hints(maker.step)  # type: ignore[attr-defined]
        models: list[Any] = [hints.get(name) for name in ("action", "return")]
        if not all(hasattr(model, "model_json_schema") for model in models):
            raise ConfigError(
                f"{maker.__qualname__}.step does not say what it takes and returns; expected annotations, such as "
                "def step(self, action: MyAction) -> MyObservation."
            )
        self._action, returned = models
        self.schemas = {"action": self._action.model_json_schema(), "observation": returned.model_json_schema()}

    def reset(self, seed: int | None) -> tuple[dict[str, Any], float | None, bool]:
        return self._parts(self._env.reset(seed=seed))

    def step(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        return self._parts(self._env.step(self._action(**fields)))

    def close(self) -> None:
        self._env.close()

    @staticmethod
    def _parts(observation: Any) -> tuple[dict[str, Any], float | None, bool]:
        return dict(observation), observation.reward, observation.done


class _Session:
    """A session of a server: OpenEnv's own client, connected at the first call."""

    thread_safe = True

    def __init__(self, url: str, timeout: float, env_id: str) -> None:
        self._url, self._timeout, self._env_id = url, timeout, env_id

    @cached_property
    def schemas(self) -> dict[str, Any]:
        """What the server publishes of its actions and observations."""
        parts = urlsplit(self._url)
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        try:
            with urlopen(f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/schema", timeout=self._timeout) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError) as error:
            needs = f"There is no answer from an OpenEnv server at {self._url}: start it, or correct the address."
            raise EnvironmentUnavailableError(self._env_id, needs, error) from error

    @cached_property
    def _client(self) -> Any:
        openenv = import_extra("openenv", extra="openenv", what="An environment of openenv:")
        limits = {"connect_timeout_s": self._timeout, "message_timeout_s": self._timeout}
        return openenv.GenericEnvClient(base_url=self._url, **limits).sync()

    def reset(self, seed: int | None) -> tuple[dict[str, Any], float | None, bool]:
        return self._parts(self._client.reset(seed=seed))

    def step(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        return self._parts(self._client.step(dict(fields)))

    def close(self) -> None:
        if "_client" in self.__dict__:
            self.__dict__.pop("_client").close()

    @staticmethod
    def _parts(result: Any) -> tuple[dict[str, Any], float | None, bool]:
        return result.observation, result.reward, result.done


# ---------------------------------------- ids


def _make(
    env_id: str,
    *,
    action: str | None = None,
    observation: str | None = None,
    action_fields: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> OpenEnvironment:
    """Make the environment of an id.

    Args:
        env_id: the id.
        action, observation, action_fields: see :class:`OpenEnvironment`.
        timeout: seconds that a server may take to connect and to answer. Default 60.
        **options: arguments of the class in this process.

    Raises:
        ConfigError: the environment has other options.
        EnvironmentUnavailableError: its server does not answer, or its class fails.
    """
    address = env_id.removeprefix("openenv:")
    backend: Backend
    if urlsplit(address).scheme in _SCHEMES:
        if options:
            raise ConfigError(
                f"The environment {env_id!r} is a server, which takes no {', '.join(sorted(options))}; it has the options "
                "action, observation, action_fields and timeout."
            )
        backend = _Session(address, timeout, env_id)
    else:
        maker = _class_of(env_id)
        try:
            inspect.signature(maker).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"The environment {env_id!r} cannot be made with the options {options}: {error}."
            ) from error
        backend = _InProcess(maker, options, env_id)
    try:
        return OpenEnvironment(env_id, backend, action=action, observation=observation, action_fields=action_fields)
    except ConfigError:
        backend.close()
        raise


def _class_of(env_id: str) -> type:
    refused = UnknownEnvironmentError(
        f"{env_id!r} names no environment of OpenEnv; expected openenv:package.module:Class, a subclass of its Environment, "
        f"or openenv:http://host:port, a server. {_CONTAINER}"
    )
    module_name, _, name = env_id.removeprefix("openenv:").partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise refused
    openenv = import_extra("openenv.core", extra="openenv", what="An environment of openenv:")
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownEnvironmentError(
            f"{env_id!r} names no class that can be imported: {error}. {_CONTAINER}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, openenv.Environment)):
        raise refused
    return found


def resolve_openenv(env_id: str) -> EnvSpec:
    """The environment of an id, such as ``"openenv:http://localhost:8000"``.

    Raises:
        UnknownEnvironmentError: the id is neither the address of a server nor a class.
        MissingExtraError: OpenEnv is not installed.

    Examples:
        >>> resolve_openenv("openenv:chess")
        Traceback (most recent call last):
            ...
        torchrl_llm.envs.faults.UnknownEnvironmentError: 'openenv:chess' names no environment of OpenEnv; ...
    """
    if urlsplit(env_id.removeprefix("openenv:")).scheme in _SCHEMES:
        import_extra("openenv.core", extra="openenv", what="An environment of openenv:")
    else:
        _class_of(env_id)
    return EnvSpec(env_id, partial(_make, env_id))
