"""Ray for as long as a command needs it: a running cluster, or one started on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, first_line, install_extra
from agentrl.system.texts import loaded_files, take_files

if TYPE_CHECKING:
    from agentrl.config.sections.trainer import RayInitConfig

logger = logging.getLogger(__name__)

NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable by which Ray forms no cluster where it is 0, on any system, and its processes stay on loopback."""
NICENESS = "RAY_worker_niceness"
"""Variable that says how far below other work Ray runs its workers."""
REACHED_WITHIN = 10.0
"""Seconds in which the machine of a cluster's address answers."""


@contextmanager
def ray_session(config: RayInitConfig, processes: int) -> Iterator[None]:
    """Ray for a run with so many processes of its own. Where this process has Ray already, that is used, and left.

    Raises ConfigError when Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"more than one device needs Ray: {install_extra('ray')}") from error
    started = start_ray(
        config.address,
        config.num_cpus or max(os.cpu_count() or 1, processes),
        dashboard=config.include_dashboard,
        env_vars=config.runtime_env.env_vars,
    )
    try:
        yield
    finally:
        if config.timeline_json_file is not None and ray.is_initialized():
            _write_timeline(Path(config.timeline_json_file))
        if started:
            ray.shutdown()


def _write_timeline(file: Path) -> None:
    """Write Ray's timeline; warn where that fails, so that the failure ends no run and hides no earlier error."""
    import ray

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        ray.timeline(str(file))
    except OSError as error:
        logger.warning("ray_init.timeline_json_file: %s", error)


def start_ray(
    address: str | None, num_cpus: int | None, *, dashboard: bool = False, env_vars: Mapping[str, str] = {}
) -> bool:
    """Connect to the cluster at `address`, or (None) start one with `num_cpus`; False where Ray was up already.

    `env_vars` are environment variables of every process that the run starts in Ray. Raises ConfigError when there is
    no such cluster, or it cannot be started.
    """
    import ray

    if ray.is_initialized():
        return False
    if address is not None:
        check_reachable(address)
    own = address is None
    try:
        with ExitStack() as stack:
            if own:
                stack.enter_context(_on_loopback())
                # By itself Ray puts workers below all other work (nice 15), and here the run consists of them.
                stack.enter_context(_unless_set(NICENESS, "0"))
            ray.init(
                address=address or "local",  # None would join a Ray that somebody else started on this machine
                num_cpus=num_cpus if own else None,
                include_dashboard=dashboard if own else None,
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env={"env_vars": dict(env_vars)} if env_vars else None,
            )
    except Exception as error:  # Ray raises bare ones, too: "The current node timed out during startup ..."
        cause = str(error.__cause__ or "").strip().splitlines()[-1:]  # a traceback, whose last line is what to do
        said = ": ".join([first_line(error), *cause])
        if address is not None:
            raise ConfigError(f"ray_init.address={address}: {said}") from error
        raise ConfigError(
            f"Ray could not be started on this machine: {said}. Its logs are in /tmp/ray/session_latest/logs. Where "
            "the machine is busy or short of memory, start Ray yourself (ray start --head) and set "
            "ray_init.address=auto, or set ray_init.num_cpus lower"
        ) from error
    return True


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a Ray that is started here listen on loopback only, as it does where it forms no cluster.

    By itself its processes listen at all addresses of the machine, and run any code sent to them. An address given to
    ray.init does not change that.
    """
    with _unless_set(NO_CLUSTER, "0") as is_free:
        if not is_free:
            yield
            return
        from ray._private import ray_constants  # which read the variable when they were imported

        before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _unless_set(name: str, value: str) -> Iterator[bool]:
    """Set an environment variable for Ray's processes, and say whether it was free: who sets it decides for himself."""
    if name in os.environ:
        yield False
        return
    os.environ[name] = value
    try:
        yield True
    finally:
        del os.environ[name]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """State of the driver that a process of Ray takes over before it loads anything that a config names."""

    folder: str
    """Working directory, for relative paths of the config."""
    files: Mapping[str, str]
    """Texts of the files that the config names (Python, YAML, templates), which another machine may not have."""

    @staticmethod
    def here() -> Surroundings:
        """Take the surroundings of this process, the driver."""
        return Surroundings(str(Path.cwd()), loaded_files())

    def enter(self) -> None:
        """In a process of Ray: work as the driver does.

        Its own folder is the one in which Ray was started. It stays there where the machine has not the driver's.
        """
        take_files(self.files)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)


def check_reachable(address: str) -> None:
    """Raises ConfigError when nobody listens at a cluster's `host:port`, for which Ray would wait for minutes."""
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # a word such as auto, which Ray looks up at once
    if host in ("localhost", "127.0.0.1") and not address.startswith("ray://"):
        host = ray.util.get_node_ip_address()  # as Ray does
    try:
        socket.create_connection((host, int(port)), REACHED_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_init.address={address}: nobody listens there ({error}). Start Ray (ray start --head), name its "
            "address, or leave the key out: then it is started on this machine"
        ) from error


def death_of(error: Exception) -> str:
    """Take one line of Ray's error about a process that is gone: the first, or the last where it could not start."""
    said = first_line(error)
    if "its creation task" in said:
        return f"its process could not start: {str(error).strip().splitlines()[-1].strip()}"
    return said
