"""wire: decode what an engine sent into Routes, and trust none of it.

A payload comes from another process, another version, often through a gateway. Known ways in which it is wrong without
an error anywhere: all zeros because the kernel never captured, a missing layer, dense layers counted or not counted,
physical instead of logical ids, a truncated body, another sample's rows. So nothing is accepted here that a check on the
bytes could have refused, and each refusal names the probable cause.

    decode(payload, spec, num_tokens=N)      Routes, from any format of `r3.wire.formats`; raises WireError
    examine(payload, spec, num_tokens=N)     the same with every finding, and no exception
    decode_vllm, decode_sglang, ...          for a caller who knows what it has asked; another format is then refused

What is done about a finding is a `Policy` (`r3.wire.checks`): STRICT by default, LENIENT to lose rows rather than samples.

The row rule: an engine returns N-1 rows (or N) for N tokens, less the first `start` prompt rows if the request asked for that.
The layer rule: it returns all hidden layers (dense ones are zeros) or the MoE layers alone; nothing else, and never a shift.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy.typing as npt

from r3.errors import ConfigError, R3Warning
from r3.routes import Routes
from r3.spec import RoutingSpec
from r3.wire.checks import STRICT, Finding, PayloadError, Policy
from r3.wire.decoding import Decoding
from r3.wire.engines import Context
from r3.wire.formats import decode_base64 as decode_base64
from r3.wire.formats import encode_envelope as encode_envelope
from r3.wire.formats import encode_int32 as encode_sglang
from r3.wire.formats import encode_lists as encode_lmdeploy
from r3.wire.formats import encode_npy as encode_vllm
from r3.wire.formats import parse_npy as parse_npy

__all__ = [
    "Decoded",
    "Request",
    "decode",
    "decode_base64",
    "decode_envelope",
    "decode_lmdeploy",
    "decode_sglang",
    "decode_vllm",
    "decode_vllm_021",
    "encode_envelope",
    "encode_lmdeploy",
    "encode_sglang",
    "encode_vllm",
    "encode_vllm_021",
    "examine",
    "parse_npy",
    "routes_from_rows",
]

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

Rows = npt.NDArray[Any]


class Request(TypedDict, total=False):
    """What all decoders are told of a request besides its payload; see `examine`."""

    num_tokens: Required[int]
    start: int
    where: str
    policy: Policy
    context: Context | None


@dataclass(frozen=True, eq=False)
class Decoded:
    """What became of a payload.

    Attributes:
        routes: None if a finding refused it.
        findings: Everything that a check found, whatever was done about it.
        format: As in `r3.wire.formats`; "" if it could not be told.
        start: The token of the first row.
        num_rows: Rows that the engine sent.
        where: The caller's place for messages.
    """

    routes: Routes | None
    findings: tuple[Finding, ...]
    format: str
    start: int
    num_rows: int
    where: str

    @property
    def refused(self) -> Finding | None:
        """The finding that refused the payload."""
        return next((finding for finding in self.findings if finding.severity == "refuse"), None)

    @property
    def num_marked(self) -> int:
        """Rows that the engine sent and that were marked unrecorded."""
        return 0 if self.routes is None else max(0, self.num_rows - self.routes.num_recorded)

    def unwrap(self) -> Routes:
        """The routes.

        Raises:
            WireError: the finding that refused the payload, with its place and probable cause.
        """
        refused = self.refused
        if refused is not None:
            raise refused.error(self.where)
        assert self.routes is not None
        for finding in self.findings:
            if finding.severity == "warn":  # without the sample's name, so that Python shows it once and not for each
                warnings.warn(str(replace(finding, place="").error("routed experts")), R3Warning, stacklevel=3)
        return self.routes


def decode(payload: Any, spec: RoutingSpec, *, format: str | None = None, **request: Unpack[Request]) -> Routes:
    """Routes of one sequence from a payload in any known format. Arguments as in `examine`.

    Raises:
        WireError: naming the check, the place and the probable cause.
    """
    return examine(payload, spec, format=format, **request).unwrap()


def decode_vllm(payload: Any, spec: RoutingSpec, **request: Unpack[Request]) -> Routes:
    """vLLM 0.22 and later: base64 of a `.npy` in `choices[i].routed_experts`. Arguments and errors as in `decode`."""
    return examine(payload, spec, format="npy", **request).unwrap()


def decode_sglang(payload: Any, spec: RoutingSpec, **request: Unpack[Request]) -> Routes:
    """SGLang and sglang-jax: base64 of raw int32 in `meta_info.routed_experts`, `sglext.routed_experts` or a choice.

    `start` is the request's `routed_experts_start_len`; releases before 0.5.12 ignore it, which the row count shows.
    """
    return examine(payload, spec, format="int32", **_by_engine("sglang", request)).unwrap()


def decode_lmdeploy(payload: Any, spec: RoutingSpec, **request: Unpack[Request]) -> Routes:
    """LMDeploy: nested lists (or an array), with one row less for a completion that a stop token ended."""
    return examine(payload, spec, **_by_engine("lmdeploy", request)).unwrap()


def decode_envelope(payload: Any, spec: RoutingSpec, **request: Unpack[Request]) -> Routes:
    """Dynamo and prime-rl: `{data, shape, dtype, start}`; its own `start` is believed before the caller's."""
    return examine(payload, spec, format="envelope", **request).unwrap()


def decode_vllm_021(prompt: Any, response: Any, spec: RoutingSpec, **request: Unpack[Request]) -> Routes:
    """vLLM 0.21: `prompt_routed_experts` (P rows) and a completion's `routed_experts` (G-1 rows, G with MTP), lists or arrays.

    `prompt` is None for all but the first prompt of a batch over HTTP; `context.prompt_tokens` then says where the rows begin,
    and the prompt's rows stay unrecorded.
    """
    return examine((prompt, response), spec, format="split", **_by_engine("vllm", request)).unwrap()


def routes_from_rows(rows: Any, spec: RoutingSpec, **request: Unpack[Request]) -> Routes:
    """An integer array [rows, layers, K] from an engine in this process: vLLM 0.14 and later, TensorRT-LLM; torch tensors too.

    Arguments and errors as in `decode`. The array is copied: engines hand out read-only or reused memory.
    """
    return examine(rows, spec, format="array", **request).unwrap()


def encode_vllm_021(rows: Rows, prompt_tokens: int) -> tuple[Any, Any]:
    """Rows [R, MoE layers, K] as vLLM 0.21 splits them."""
    return encode_lmdeploy(rows[:prompt_tokens]), encode_lmdeploy(rows[prompt_tokens:])


def examine(
    payload: Any,
    spec: RoutingSpec,
    *,
    num_tokens: int,
    start: int = 0,
    where: str = "routed_experts",
    policy: Policy = STRICT,
    context: Context | None = None,
    format: str | None = None,
) -> Decoded:
    """Decode a payload and say everything that the checks found, without raising for what is wrong with it.

    Args:
        payload: The JSON value, bytes, array or tensor; or the object that holds it (`meta_info`, `sglext`, a choice).
        spec: The routing of the model that sampled.
        num_tokens: N, prompt and sampled tokens together.
        start: The request's `routed_experts_prompt_start` or `routed_experts_start_len`: rows that were not sent stay unrecorded.
        where: Place for messages, e.g. the sample.
        policy: What is done about findings.
        context: What else is known of the request; it sharpens the causes.
        format: One of `r3.wire.reading.FORMATS`, None to find out.

    Raises:
        ConfigError: `start` lies outside of the sequence.
    """
    if not 0 <= start <= max(num_tokens, 0):
        raise ConfigError("start lies outside of the sequence", where=where, expected=f"0..{num_tokens}", got=start)
    work = Decoding(spec, num_tokens, start, where, policy, context or Context())
    routes = None
    try:
        routes = work.routes(payload, format)
    except PayloadError as error:
        work.findings += [error.finding] if error.finding else []
    return Decoded(routes, tuple(work.findings), work.format, work.start, work.num_rows, where)


def _by_engine(engine: str, request: Request) -> Request:
    context = request.get("context") or Context()
    return {**request, "context": context if context.engine else replace(context, engine=engine)}
