"""Mutants: which there are of a file, how they read, and a sample of them by package."""

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

PACKAGES: Final = {
    "kvstore": ("kvstore/", 150),
    "engine/core": ("engine/core/", 150),
    "engine/grammar": ("engine/grammar/", 100),
    "engine/mlx_backend": ("engine/mlx_backend/", 150),
    "engine/disk_cache": ("engine/disk_cache/", 50),
    "engine/drafts": ("engine/drafts/", 50),
    "engine": ("engine/", 50),
    "server/parsing": ("server/parsing/", 100),
    "server": ("server/", 150),
    "measuring": ("measuring/", 50),
}
"""Where the files of a package are, and how many of 1,000 mutants it gets. A file belongs to the
first package that has it.
"""

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_LOG_METHODS: Final = {"debug", "info", "warning", "error", "exception", "critical", "log"}

Change: TypeAlias = tuple[ast.expr | ast.stmt, str, str]
"""The node to replace, the operator's name, and the text that replaces the node."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file. `occurrence` counts the changes by the same operator of lines that
    read the same, so it stays the same mutant when lines are added to the file.
    """

    file: str
    text: str
    operator: str
    occurrence: int

    @property
    def package(self) -> str:
        return next(name for name, (start, _) in PACKAGES.items() if self.file.startswith(start))


@dataclass(frozen=True)
class Site:
    """Where a file is changed: the lines that must run for the change to matter, and the file's
    whole text with the change. All other lines keep their numbers.
    """

    lines: range
    source: bytes


def sites(file: str, source: bytes) -> dict[Mutant, Site]:
    """All mutants of a file's functions."""
    rows = source.splitlines(keepends=True)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for node, operator, text in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        line = rows[node.lineno - 1].decode().strip()
        mutant = Mutant(file, line, operator, seen[line, operator])
        seen[line, operator] += 1
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        padding = "\n" * (node.end_lineno - node.lineno)
        changed = f"({text}{padding})" if isinstance(node, ast.expr) else text + padding
        lines = range(node.lineno, node.end_lineno + 1)
        found[mutant] = Site(lines, source[:begin] + changed.encode() + source[end:])
    return found


def draw(tree: Path, n_mutants: int, seed: int) -> list[Mutant]:
    """A sample in random order, spread over the packages as PACKAGES says."""
    pools: dict[str, list[Mutant]] = {name: [] for name in PACKAGES}
    for path in sorted(tree.glob("**/*.py")):
        file = str(path.relative_to(tree))
        if file.startswith(tuple(start for start, _ in PACKAGES.values())):
            for mutant in sites(file, path.read_bytes()):
                pools[mutant.package].append(mutant)
    whole = sum(share for _, share in PACKAGES.values())
    chosen = []
    for name, (_, share) in PACKAGES.items():
        wanted = min(round(n_mutants * share / whole), len(pools[name]))
        chosen += random.Random(f"{seed} {name}").sample(pools[name], wanted)
    random.Random(seed).shuffle(chosen)
    return chosen


def _changes(tree: ast.Module) -> Iterator[Change]:
    """All changes of a file's functions, in the file's order."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    locks = _locks(tree)
    while pending:
        node, within_function = pending.pop()
        if within_function:
            yield from _changes_of(node, locks)
        below = within_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        pending += [(child, below) for child in reversed(_children(node))]


def _children(node: ast.AST) -> list[ast.AST]:
    """The parts that tests can be expected to notice: no annotations, assertions, log lines,
    f-strings (whose parts have no exact position before Python 3.12), and nothing that never runs.
    """
    children = list(ast.iter_child_nodes(node))
    match node:
        case ast.AnnAssign(value=value):
            children = [value] if value else []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            decorators = {*map(ast.unparse, node.decorator_list)}
            children = [] if {"abstractmethod", "overload"} & decorators else [*node.body]
        case ast.ClassDef():
            children = [] if "Protocol" in map(ast.unparse, node.bases) else [*node.body]
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Assert():
            children = []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            children = []
        case ast.Call() if _is_log(node):
            children = []
        case ast.Lambda():
            children = [node.body]
    return children


def _is_log(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
            return method in _LOG_METHODS and "log" in name.lower()
    return False


def _locks(tree: ast.Module) -> set[str]:
    """What the file calls its locks and conditions, `lock` always."""
    return {"lock"} | {
        ast.unparse(target).split(".")[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func).split(".")[-1] in {"Lock", "RLock", "Condition"}
        for target in node.targets
    }


def _changes_of(node: ast.AST, locks: set[str]) -> Iterator[Change]:  # noqa: PLR0912 - a table
    match node:
        case ast.Compare(left=left, ops=[op, *ops], comparators=comparators):
            other = ast.Compare(left, [_COMPARISONS[type(op)](), *ops], comparators)
            yield node, "comparison", ast.unparse(other)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as arithmetic, right=right):
            swapped = ast.Sub() if isinstance(arithmetic, ast.Add) else ast.Add()
            yield node, "plus-minus", ast.unparse(ast.BinOp(left, swapped, right))
        case ast.BoolOp(op=joined, values=values):
            either = ast.Or() if isinstance(joined, ast.And) else ast.And()
            yield node, "and-or", ast.unparse(ast.BoolOp(either, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not", ast.unparse(operand)
        case ast.Constant(value=bool(truth)):
            yield node, "constant", str(not truth)
        case ast.Constant(value=int(number) | float(number)):
            yield node, "constant", str(number + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test, "always", "True"
            yield test, "never", "False"
        case ast.While(test=test):
            yield test, "never", "False"
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as change, value=value):
            sign = "-=" if isinstance(change, ast.Add) else "+="
            yield node, "plus-minus", f"{ast.unparse(target)} {sign} {ast.unparse(value)}"
            yield node, "statement", "pass"
        case ast.With(items=[ast.withitem(ast.Attribute() | ast.Name() as lock)]):
            if ast.unparse(lock).split(".")[-1] in locks:
                yield lock, "lock", "__import__('contextlib').nullcontext()"
        case ast.Expr(value=ast.Call() | ast.Await() as call) if not _is_log(call):
            yield node, "statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "statement", "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return", "return None"
        case ast.Break():
            yield node, "break-continue", "continue"
        case ast.Continue():
            yield node, "break-continue", "break"
