"""One finding of the doctor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """`detail`: what was found; of one that failed, also what that means."""

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.name}: {self.detail}"
