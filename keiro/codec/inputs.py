"""The arguments of a workflow as its stored input, a JSON object by parameter name, and back into the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from keiro.codec.decoding import Decoder, Hint, Hints, Json, decode_object, plain
from keiro.codec.encoding import PAYLOAD_LIMIT, encode
from keiro.codec.hooks import decode_any, encode_sorted
from keiro.errors import DecodeFailed, InvalidCall, PayloadRejected


class InputCodec:
    """Encodes the arguments of one function and decodes them by its annotations.

    `*args` are a list under their own name; what `**kwargs` take stands beside the other parameters. Arguments
    that were not given are not stored: their default is that of the code that runs, so a parameter may be added
    later with a default. A stored name the function no longer takes is an error, unless it has `**kwargs`.
    """

    __slots__ = ("_decoders", "_keyword_only", "_others", "_positional", "_rest", "_shown", "where")

    def __init__(self, fn: Callable[..., Any], *, skip_first: bool, where: str) -> None:
        parameters = list(inspect.signature(fn).parameters.values())
        if skip_first:
            if not parameters or parameters[0].kind in (
                parameters[0].KEYWORD_ONLY,
                parameters[0].VAR_KEYWORD,
            ):
                raise InvalidCall(f"{where}: the function must take the run as its first parameter")
            if parameters[0].kind is not parameters[0].VAR_POSITIONAL:
                del parameters[0]
        self.where = where
        self._positional: list[inspect.Parameter] = []
        self._keyword_only: list[inspect.Parameter] = []
        self._rest: str | None = None
        self._others: Decoder | None = None
        self._decoders: dict[str, Decoder] = {}
        self._shown = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
        hints = Hints(fn)
        for parameter in parameters:
            decoder = _decoder(hints, parameter, where)
            match parameter.kind:
                case parameter.VAR_KEYWORD:
                    self._others = decoder
                    continue
                case parameter.VAR_POSITIONAL:
                    self._rest = parameter.name
                case parameter.KEYWORD_ONLY:
                    self._keyword_only.append(parameter)
                case _:
                    self._positional.append(parameter)
            self._decoders[parameter.name] = decoder

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, limit: int = PAYLOAD_LIMIT) -> bytes:
        """The stored input of a call.

        Raises `InvalidCall` for arguments the function does not take, and `PayloadRejected` for values that cannot
        be stored, or would not be read back as the annotations say: nothing is started that cannot run.
        """
        data = encode(self._bind(args, kwargs), where=self.where, limit=limit)
        for name, raw in decode_object(data).items():
            decoder = self._decoders.get(name, self._others)
            assert decoder is not None
            try:
                decoder(raw)
            except DecodeFailed as error:
                text, path = decoder.explain(error.__cause__)
                raise PayloadRejected(
                    f"{self.where}: {path} does not fit the annotation of {name!r}: {text}. Pass what it says,"
                    " or annotate the parameter with what is passed",
                    where=self.where,
                    path=path,
                ) from error
        return data

    def decode(self, data: Json) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call; raises `DecodeFailed` if they do not fit the function."""
        try:
            stored = decode_object(data)
        except Exception as error:
            raise DecodeFailed(
                f"{self.where} must be a JSON object of the arguments by name: {error}", where=self.where
            ) from error
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        decoders = self._decoders
        for parameter in self._positional:
            raw = stored.pop(parameter.name, None)
            args.append(self._default(parameter) if raw is None else decoders[parameter.name](raw))
        for parameter in self._keyword_only:
            raw = stored.pop(parameter.name, None)
            kwargs[parameter.name] = self._default(parameter) if raw is None else decoders[parameter.name](raw)
        if self._rest is not None and (raw := stored.pop(self._rest, None)) is not None:
            args.extend(decoders[self._rest](raw))
        if stored:
            if self._others is None:
                raise DecodeFailed(
                    f"{self.where} holds {', '.join(map(repr, stored))}, but the function takes {self._shown}."
                    " Keep a parameter as long as runs that were started with it are open, or add **kwargs",
                    where=self.where,
                )
            kwargs.update((name, self._others(raw)) for name, raw in stored.items())
        return tuple(args), kwargs

    def same(self, left: Json, right: Json) -> bool:
        """Whether two stored inputs are the same call: sets and mappings may be in another order."""
        try:
            return encode_sorted(self.decode(left)) == encode_sorted(self.decode(right))
        except Exception:
            return bool(decode_any(left) == decode_any(right))

    def _default(self, parameter: inspect.Parameter) -> Any:
        if parameter.default is parameter.empty:
            raise DecodeFailed(
                f"{self.where} has no value for parameter {parameter.name!r}. Give a parameter that is added later"
                " a default: runs started before have no value for it",
                where=self.where,
            )
        return parameter.default

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {p.name: value for p, value in zip(self._positional, args, strict=False)}
        if len(args) > len(values):
            if self._rest is None:
                raise self._invalid(f"{len(args)} arguments were given by position, at most {len(values)} are taken")
            values[self._rest] = args[len(values) :]
        for name, value in kwargs.items():
            if name in values:
                raise self._invalid(f"parameter {name!r} was given twice")
            if name not in self._decoders and self._others is None:
                raise self._invalid(f"there is no parameter {name!r}")
            if name == self._rest:
                raise self._invalid(f"{name!r} stands for further arguments by position, not for a keyword")
            values[name] = value
        for parameter in self._positional:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in kwargs:
                raise self._invalid(f"parameter {parameter.name!r} can only be given by position")
        for parameter in (*self._positional, *self._keyword_only):
            if parameter.default is parameter.empty and parameter.name not in values:
                raise self._invalid(f"parameter {parameter.name!r} is missing")
        return values

    def _invalid(self, problem: str) -> InvalidCall:
        return InvalidCall(f"{self.where}: {problem}; the arguments are {self._shown}")


def input_codec(fn: Callable[..., Any], *, skip_first: bool, where: str | None = None) -> InputCodec:
    """The codec of the arguments of `fn`, without its first parameter where that is the run."""
    place = where or f"input of {getattr(fn, '__qualname__', None) or repr(fn)}"
    return InputCodec(fn, skip_first=skip_first, where=place)


def _decoder(hints: Hints, parameter: inspect.Parameter, where: str) -> Decoder:
    def hint() -> Hint:
        found = hints.of(parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            return found._replace(annotation=list[plain(found.annotation)])  # type: ignore[misc]
        return found

    root = "$" if parameter.kind is parameter.VAR_KEYWORD else f"$.{parameter.name}"
    return Decoder(hint, where=f"parameter {parameter.name!r} of the {where}", root=root)
