"""Everything a user can cause, told in one way: what, got, expected, way out."""

from __future__ import annotations

from collections.abc import Sequence


class CompressorError(Exception):
    """A problem the user can act on.

    Args:
        what: The thing and what is wrong with it, e.g. ``model.layers.3.mlp.down_proj: ...``.
        got: What was found.
        expected: What would have been right.
        hint: The way out: a command, an option, a value to use.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        expected: object | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.got, self.expected, self.hint = what, got, expected, hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        for label, value in (("got", self.got), ("expected", self.expected), ("try", self.hint)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)


class Problems(CompressorError):
    """Several problems found at once (a recipe's typos, every tensor a group size does not divide)."""

    def __init__(self, what: str, problems: Sequence[CompressorError], hint: str | None = None):
        self.problems = list(problems)
        super().__init__(what, hint=hint)

    def __str__(self) -> str:
        body = "\n".join(f"- {problem}" for problem in self.problems)
        tail = f"\n  try: {self.hint}" if self.hint else ""
        return f"{self.what}\n{body}{tail}"


class GateFailed(CompressorError):
    """A check ran and the answer is no (a damaged tensor, a divergence over the limit)."""

    exit_code = 1
