"""How is a layout written? Text to a syntax tree in which every part remembers where it stands."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["DimExpr", "Factor", "LayoutError", "LayoutExpr", "Mark", "Span", "SpecExpr", "Word", "parse_spec"]

OPS = ("sum", "max", "min")
TIERS = ("device", "host", "disk", "paged")

Span = tuple[int, int]
_TOKEN = re.compile(r"->|//|\.\.\.|[()+~:@]|\d+|[A-Za-z_]\w*|\S")


class LayoutError(ValueError):
    """A pattern that does not parse, or does not fit its tensor and mesh.

    Its text shows the problem, the pattern with a mark under the part at fault, the tensor, the mesh and what to write.
    """

    def __init__(
        self,
        problem: str,
        pattern: str,
        span: Span,
        fix: str,
        name: str = "",
        shape: tuple[int, ...] | None = None,
        mesh: str | None = None,
    ) -> None:
        super().__init__(problem, pattern, span, fix, name, shape, mesh)
        self.problem, self.pattern, self.span, self.fix = problem, pattern, span, fix
        self.name, self.shape, self.mesh = name, shape, mesh

    def about(self, name: str, shape: tuple[int, ...], mesh: str) -> LayoutError:
        """The same error about this tensor on this mesh."""
        return LayoutError(self.problem, self.pattern, self.span, self.fix, name, shape, mesh)

    def __str__(self) -> str:
        start, stop = self.span
        lines = [self.problem, f"    {self.pattern}", "    " + " " * start + "^" * max(1, stop - start)]
        if self.shape is not None:
            tensor = f"{self.name!r}" if self.name else "a tensor"
            lines.append(f"  for {tensor} of shape {self.shape} on Mesh({self.mesh!r})")
        return "\n".join([*lines, f"  {self.fix}"])


@dataclass(frozen=True, slots=True)
class Factor:
    """`tp`, `~tp`, `heads` or `3`."""

    text: str
    span: Span
    back_and_forth: bool = False

    @property
    def size(self) -> int | None:
        """The size of a factor that is a number."""
        return int(self.text) if self.text.isdigit() else None


@dataclass(frozen=True, slots=True)
class Word:
    """Factors of one segment, major to minor."""

    factors: tuple[Factor, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class DimExpr:
    """One dim: the words that `+` joins; none for `...`."""

    words: tuple[Word, ...]
    span: Span
    grouped: bool = False

    @property
    def is_ellipsis(self) -> bool:
        return not self.words


@dataclass(frozen=True, slots=True)
class Mark:
    """`sum:tp`: the value is the sum over `tp`."""

    op: str
    axis: str
    span: Span


@dataclass(frozen=True, slots=True)
class LayoutExpr:
    """`dims // marks @tier`."""

    dims: tuple[DimExpr, ...]
    marks: tuple[Mark, ...]
    tier: str
    span: Span


@dataclass(frozen=True, slots=True)
class SpecExpr:
    """`stored -> used`; `used` is None where the pattern is one layout."""

    pattern: str
    stored: LayoutExpr
    used: LayoutExpr | None


@lru_cache(maxsize=4096)
def parse_spec(pattern: str) -> SpecExpr:
    """The syntax tree of a layout, or of a spec `stored -> used`.

    Args:
        pattern: the text; runs of white space count as one space.

    Raises:
        LayoutError: text outside the grammar, with a mark under it.

    >>> spec = parse_spec("(tp dp o) i @host -> (tp o) i")
    >>> [factor.text for factor in spec.stored.dims[0].words[0].factors], spec.stored.tier
    (['tp', 'dp', 'o'], 'host')
    """
    return _Reader(" ".join(pattern.split())).spec()


class _Reader:
    """Recursive descent over the tokens of one pattern; one method a rule of the grammar."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.tokens = [(match.group(), match.span()) for match in _TOKEN.finditer(pattern)]
        self.tokens.append(("", (len(pattern), len(pattern))))
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at][0]

    @property
    def span(self) -> Span:
        return self.tokens[self.at][1]

    def take(self) -> tuple[str, Span]:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def fail(self, problem: str, fix: str, span: Span | None = None) -> LayoutError:
        return LayoutError(problem, self.pattern, span or self.span, fix)

    def spec(self) -> SpecExpr:
        stored, used = self.layout(), None
        if self.next == "->":
            self.take()
            used = self.layout()
        if self.next:
            fix = "a spec is 'stored -> used': write '->' once" if self.next == "->" else _SHAPE_OF_A_LAYOUT
            raise self.fail(f"{self.next!r} does not belong here", fix)
        return SpecExpr(self.pattern, stored, used)

    def layout(self) -> LayoutExpr:
        start = self.span[0]
        dims: list[DimExpr] = []
        while self.next not in ("", "//", "@", "->"):
            dims.append(self.dim())
            if dims[-1].is_ellipsis and sum(dim.is_ellipsis for dim in dims) > 1:
                raise self.fail("'...' stands twice", "write '...' once, and name the other dims", dims[-1].span)
        marks: list[Mark] = []
        if self.next == "//":
            self.take()
            marks.append(self.mark())
            while self.next not in ("", "@", "->"):
                marks.append(self.mark())
        tier = "device"
        if self.next == "@":
            self.take()
            tier, span = self.take()
            if tier not in TIERS:
                fix = f"write one of {', '.join('@' + known for known in TIERS)}" + did_you_mean(tier, TIERS)
                raise self.fail(f"{tier!r} is not a tier", fix, span)
        stop = self.tokens[self.at - 1][1][1] if self.at else start
        return LayoutExpr(tuple(dims), tuple(marks), tier, (start, max(start, stop)))

    def dim(self) -> DimExpr:
        start = self.span[0]
        if self.next == "...":
            return DimExpr((), self.take()[1])
        if self.next == "~":
            raise self.fail("'~' stands outside parentheses", "write it in a group, such as (2 ~sp s)")
        if self.next != "(":
            factor = self.factor()
            return DimExpr((Word((factor,), factor.span),), factor.span)
        opened = self.take()[1]
        words = [self.word()]
        while self.next == "+":
            self.take()
            words.append(self.word())
        if self.next != ")":
            raise self.fail("this parenthesis is not closed", "write ')' behind the last factor of the dim", opened)
        return DimExpr(tuple(words), (start, self.take()[1][1]), grouped=True)

    def word(self) -> Word:
        factors: list[Factor] = []
        while self.next not in ("+", ")", "", "//", "@", "->"):
            factors.append(self.factor())
            if factors[-1].size == 0:
                raise self.fail("a factor of size zero", "write a factor of at least one", factors[-1].span)
        if not factors:
            raise self.fail("a segment without factors", "write its factors, or 1 for a dim of size one")
        return Word(tuple(factors), (factors[0].span[0], factors[-1].span[1]))

    def factor(self) -> Factor:
        start, turns = self.span[0], self.next == "~"
        if turns:
            self.take()
        text, span = self.take()
        if turns and not text.isidentifier():
            raise self.fail("'~' is to stand before a mesh axis", "write ~axis, such as (2 ~sp s)", (start, span[1]))
        if text.isidentifier() or text.isdigit():
            return Factor(text, (start, span[1]), turns)
        fix = {
            "...": "'...' stands for whole dims: write it outside the parentheses",
            "(": "parentheses do not nest: write the factors of a dim in one group",
            ")": "write '(' before the first factor of the dim",
            "+": "segments are written in parentheses: (tp q + tp k)",
            ":": "a mark is written behind '//': (tp o) i // sum:dp",
        }.get(text, _SHAPE_OF_A_LAYOUT)
        raise self.fail(f"{text!r} does not belong here", fix, span)

    def mark(self) -> Mark:
        first, (start, stop) = self.take()
        op, axis = "sum", first
        if self.next == ":":
            self.take()
            op, (axis, (_, stop)) = first, self.take()
        if op not in OPS:
            fix = f"write one of sum:{axis}, max:{axis}, min:{axis}" + did_you_mean(op, OPS)
            raise self.fail(f"{op!r} is not a reduction", fix, (start, stop))
        if not axis.isidentifier():
            fix = "write '// tp', '// max:tp' or '// sum:tp dp'"
            raise self.fail("a mark is to name a mesh axis", fix, (start, stop))
        return Mark(op, axis, (start, stop))


_SHAPE_OF_A_LAYOUT = "a layout is dims, then '// marks', then '@tier': (tp o) i // dp @host"


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """`"; did you mean 'host'?"`, or nothing where no known name is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
