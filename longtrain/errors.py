"""Exit codes, one exception per kind of failure, and how an error is shown to a person.

Nothing here imports anything beyond the standard library, so that an error can be shown however early it comes.
"""

import dataclasses


class LongtrainError(Exception):
    """Base of every error a user may meet. `exit_code` is the process's exit status."""

    exit_code = 1


class CheckFailed(LongtrainError):
    """A check the user asked for (`doctor`, `plan`, `--verify`) does not hold."""

    exit_code = 1


class DataError(LongtrainError):
    """Training data is missing, corrupt or used up."""

    exit_code = 3


class NonFiniteError(LongtrainError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = 4


class CheckpointError(LongtrainError):
    """A checkpoint cannot be written or read."""

    exit_code = 5


class ClusterError(LongtrainError):
    """The devices or processes asked for are not there, a peer died, or what travels between them is lost."""

    exit_code = 6


class Preempted(LongtrainError):
    """The run was told to stop and has saved: the same command again goes on."""

    exit_code = 75


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: the dotted key, the value given, and what is legal."""

    key: str
    value: object
    message: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.message}"


class ConfigError(LongtrainError):
    """A config that is refused, with every problem it has."""

    exit_code = 2

    def __init__(self, problems: list[Problem], source: str = "config"):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source} is refused ({count}):", *(f"  {problem}" for problem in problems)]))
