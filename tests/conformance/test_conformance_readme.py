"""The table of conformance names every line and only tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
README = Path(__file__).with_name("README.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line.startswith("| ")]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", README)))
PROMISED = [
    *(f"WF-{n:02}" for n in (*range(1, 12), 20, 21, 24, *range(30, 36), *range(60, 69), 80, 81, 82, 170, 171, 172)),
    *(f"WF-{n}" for n in (*range(40, 44), *range(100, 116), *range(120, 133), *range(140, 145))),
    *(f"F{n}" for n in (*range(1, 7), 11, 21, *range(23, 30))),
    *("U2", "U3", "U16", "U24"),
    *(f"L{n}" for n in range(1, 24)),
    *(f"R{n}" for n in range(1, 12)),
    *(f"F{n}" for n in (7, 8, 9, 10, 19, 31, 35, 37, 50, 51, 54, 55)),
    *(f"U{n}" for n in (10, 11, 12, 13, 14, 15, 17, 18, 19, 23)),
    *(f"P{n}" for n in range(1, 8)),
    *(f"WF-{n}" for n in (25, 26, 27, 69, 70, 91, 96, 143)),
    *(f"CH-{n:02}" for n in (*range(1, 8), 13, 16, 19, 20, *range(26, 29), 30, 44, 45, 46, 47, *range(50, 54))),
    *(f"CH-{n}" for n in range(60, 65)),
    *(f"F{n}" for n in (2, 12, 13, 16, 17, 18, 20, 22, 34, 36, 39)),
    *(f"U{n}" for n in (1, 4, 5, 6, 7, 8, 9, 20, 21, 22)),
    *(f"SC-{n}" for n in range(1, 10)),
    *(f"J{n}" for n in range(1, 18)),
]


@cache
def found_in(path: str) -> dict[str, str]:
    """The tests of a file by name, with their docstrings."""
    tree = ast.parse((TESTS / path).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name: ast.get_docstring(function) or "" for function in functions}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_test_that_is_named_exists(path: str, name: str) -> None:
    assert name in found_in(path)


def test_every_line_is_there_once() -> None:
    ids = [own for row in ROWS for own in row[0].split(", ")]
    assert [one for one in PROMISED if ids.count(one) != 1] == []


def test_every_line_has_a_test_or_says_why_not() -> None:
    for row in ROWS:
        if row[0] != "id" and not row[0].startswith("---"):
            says_why = row[1].startswith(("Not here", "Replaced"))
            assert "::" in row[2] or says_why, row[0]


def test_ids_stand_in_the_tests_of_their_lines() -> None:
    """In the name or the docstring of one of them at least, so that a search finds it."""
    for own, says, tests in ((own, *row[1:]) for row in ROWS for own in row[0].split(", ")):
        if own in PROMISED and not says.startswith("Not here"):
            letters, number = re.split(r"-?(?=\d)", own, maxsplit=1)
            named = re.compile(rf"_{letters.lower()}_?{number}(?!\d)")
            written = re.compile(rf"\b{own}\b")
            carry = [
                name
                for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
                if named.search(name) or written.search(found_in(path)[name])
            ]
            assert carry, own
