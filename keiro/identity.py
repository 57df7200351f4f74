"""Names, keys, run ids and deterministic event ids.

A run is identified by `(workflow, key)` and a round; its id is one string that parses one way only. Event ids are
UUIDv5 in the URL namespace over UTF-8 text, so every process derives the same id for the same step.
"""

from __future__ import annotations

import base64
import hashlib
import re
import uuid
from functools import partial
from typing import Final, NamedTuple

from keiro.errors import InvalidName

WORKFLOW_NAME: Final = re.compile(r"[A-Za-z0-9_.]{1,128}")
ROUND: Final = re.compile(r"[1-9][0-9]*")
MAX_KEY_BYTES: Final = 512
MAX_STEP_BYTES: Final = 512
_sha1: Final = partial(hashlib.sha1, usedforsecurity=False)
_FREE: Final = ~((0xF << 76) | (0x3 << 62)) & ((1 << 128) - 1)
_VERSION_5: Final = (0x5 << 76) | (0x2 << 62)
_FORBIDDEN: Final = re.compile(r"[:#\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_TOKEN: Final = "kdt_"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_FORBIDDEN_IN_STEP: Final = re.compile(r"[:#/\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class RunId(NamedTuple):
    """The parts of a run id `wf:<workflow>-<key>` (round 0) or `wf:<workflow>-<key>#<round>`."""

    workflow: str
    key: str
    round: int = 0

    def __str__(self) -> str:
        return run_id(self.workflow, self.key, self.round)


def check_workflow_name(name: str) -> str:
    """Return `name` if it may name a workflow, else raise `InvalidName`."""
    if not isinstance(name, str) or not WORKFLOW_NAME.fullmatch(name):
        raise InvalidName(f"{name!r} cannot name a workflow: use 1 to 128 of the characters A-Z a-z 0-9 _ .")
    return name


def check_key(key: str) -> str:
    """Return `key` if it may identify a run of a workflow, else raise `InvalidName`."""
    if not isinstance(key, str) or not key:
        raise InvalidName(f"{key!r} cannot be the id of a run: it must be a non-empty string")
    if found := _FORBIDDEN.search(key):
        raise InvalidName(
            f"{key!r} cannot be the id of a run: character {found[0]!r} at {found.start()} is not allowed "
            "(no ':' or '#', no control characters, no lone surrogates)"
        )
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidName(
            f"the id of a run has at most {MAX_KEY_BYTES} bytes of UTF-8, this one has {len(key.encode())}"
        )
    return key


def check_step_name(name: str) -> str:
    """Return `name` if it may name a user's step or scope, else raise `InvalidName`."""
    if not isinstance(name, str) or not name:
        raise InvalidName(f"{name!r} cannot name a step: it must be a non-empty string")
    if found := _FORBIDDEN_IN_STEP.search(name):
        raise InvalidName(
            f"{name!r} cannot name a step: character {found[0]!r} at {found.start()} is not allowed "
            "(no ':' '#' or '/', no control characters, no lone surrogates)"
        )
    if name.startswith("__workflow"):
        raise InvalidName(f"{name!r} cannot name a step: names that begin with '__workflow' are the engine's own")
    if len(name.encode()) > MAX_STEP_BYTES:
        raise InvalidName(f"a step name has at most {MAX_STEP_BYTES} bytes of UTF-8, this one has {len(name.encode())}")
    return name


def check_command_id(text: str) -> str:
    """Return `text` if it may identify a command, else raise `InvalidName`."""
    if not isinstance(text, str) or not text or _SURROGATE.search(text):
        raise InvalidName(f"{text!r} cannot be the id of a command: it is a non-empty string without lone surrogates")
    return text


def run_id(workflow: str, key: str, round: int = 0) -> str:
    """The string that identifies a run in the journal, in every table and as `originator_id`."""
    return f"wf:{workflow}-{key}#{round}" if round else f"wf:{workflow}-{key}"


def parse_run_id(text: str) -> RunId:
    """Split a run id into its parts; raise `InvalidName` if it is not one."""
    head, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    workflow, dash, tail = rest.partition("-")
    key, hash_, round_ = tail.partition("#")
    if head != "wf" or not dash or (hash_ and not ROUND.fullmatch(round_)):
        raise InvalidName(
            f"{text!r} is not a run id: it must read wf:<workflow>-<key> or wf:<workflow>-<key>#<round>{_meant(text)}"
        )
    return RunId(check_workflow_name(workflow), check_key(key), int(round_) if hash_ else 0)


def _meant(text: object) -> str:
    """What to add for somebody who wrote `<workflow>-<key>`, as in the call that started the run."""
    if not isinstance(text, str) or text.startswith("wf:"):
        return ""
    try:
        return f". Was {str(parse_run_id(f'wf:{text}'))!r} meant?"
    except InvalidName:
        return ""


class StepIds:
    """Derives the event ids of one round: UUIDv5 of `keiro:workflow:<workflow>:<key>:<round>:<step>`.

    It keeps the text and not the hash of the common prefix: a hash object of OpenSSL takes ten times the memory.
    """

    __slots__ = ("_prefix",)

    def __init__(self, workflow: str, key: str, round: int) -> None:
        self._prefix = uuid.NAMESPACE_URL.bytes + f"keiro:workflow:{workflow}:{key}:{round}:".encode()

    def __call__(self, step: str) -> bytes:
        """The 16 bytes of the id of the event that records `step`."""
        number = int.from_bytes(_sha1(self._prefix + step.encode()).digest()[:16])
        return (number & _FREE | _VERSION_5).to_bytes(16)


def suspended_step(version: int) -> str:
    """The name of the event that parks a run which is at `version`."""
    return f"__workflow_suspended__#{version}"


def again(step: str, retractions: int) -> str:
    """What the id of the record of `step` is derived from, after it was retracted so often."""
    return f"{step}#retracted-{retractions}" if retractions else step


def begun_step(step: str, retractions: int) -> str:
    """The name of the event that says that the first attempt of `step` has begun, since it was retracted so often."""
    return f"__workflow_begun__/{again(step, retractions)}"


def child_step(key: str) -> str:
    """The step that a spawn records in the parent."""
    return f"child:{key}"


def child_result_step(key: str) -> str:
    """The step that the end of a child records in its parent."""
    return f"child:{key}:result"


def deferred_step(name: str) -> str:
    """The step that the completion of a deferred records."""
    return f"awk:{name}"


def token_step(name: str) -> str:
    """The step that records the token of a deferred."""
    return f"awkid:{name}"


def token_of(run_id: str, name: str, secret: str) -> str:
    """The token that completes the deferred `name` of a run."""
    return _TOKEN + base64.urlsafe_b64encode(f"{run_id}\n{name}\n{secret}".encode()).decode().rstrip("=")


def parse_token(token: str) -> tuple[str, str, str]:
    """The run id, the name and the secret in a token; raise `InvalidName` if it is none."""
    try:
        if not isinstance(token, str) or not token.startswith(_TOKEN):
            raise ValueError
        text = token.removeprefix(_TOKEN)
        run_id, name, secret = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().split("\n")
    except ValueError:
        raise InvalidName(f"{token!r:.100} is no token of a deferred: those come from deferred.token()") from None
    parse_run_id(run_id)
    return run_id, name, secret


def lineage_of(run_id: str) -> str:
    """The run id of round 0."""
    return run_id.partition("#")[0]


def sleep_id(workflow: str, key: str, round: int, step: str) -> uuid.UUID:
    """The id of a sleep's clock; round 0 keeps the form without a round."""
    middle = f"{round}:" if round else ""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"keiro:workflow-sleep:{workflow}:{key}:{middle}{step}")
