"""The layer pass: a list of micro-batches through the decoder layers, layer by layer.

Each micro-batch's own `model.forward` runs in a greenlet. A hook in front of every
decoder layer switches back to the pass, so that all micro-batches cross layer i before
any enters layer i + 1, while `transformers`' own code does masks, rotary embeddings,
residual streams and caches. No tracing and no code per family.

A wave is a pass over the whole queue; a step is a pass over a few chunks. Schedules
only choose the list.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from leadline.core.errors import LeadlineError, UsageError
from leadline.rig.experts import ExpertRows, ExpertsCall
from leadline.rig.residuals import ResidualStore
from leadline.rig.skeleton import Skeleton, hidden_argument


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What crosses the layers together: documents side by side, or a piece of one."""

    tokens: Tensor
    """Ids int64 [B, T] on the host, right-padded."""
    rows: Tensor | None = None
    """Flat indices int64 into B * T of the tokens that are no padding; None: all."""
    counted: Tensor | None = None
    """Indices int64, among those tokens, that count for the tap; None: all."""
    cache: Any = None
    """Keys and values of the document so far; the forward appends to it."""
    label: str = ""
    """For messages: the documents in it."""


class LayerWeights(Protocol):
    """Where the weights come from (`leadline.rig.weights`)."""

    def acquire_entry(self) -> None:
        """Return when embeddings and what else stands outside the layers are in place."""

    def release_entry(self) -> None:
        """Embeddings are not needed again in this pass."""

    def acquire(self, layer: int, stage: int) -> None:
        """Return when the weights of the layer's stage are in place."""

    def release(self, layer: int, stage: int) -> None:
        """All work that reads them has been queued on the current stream."""

    def groups(self, layer: int) -> tuple[range, ...]:
        """Experts of each stage of *layer*; one range when it comes whole."""


class PassListener(Protocol):
    """What a pass tells about itself; all on the thread that runs it."""

    def experts(self, layer: int, module: str) -> ExpertRows | None:
        """Whom to tell the rows of an experts module."""

    def linear(self, layer: int, module: str, rows: Tensor, source: Tensor) -> None:
        """Counted rows [N, K] of *source*, the input of a linear projection."""

    def wants_linears(self) -> bool:
        """Whether `linear` is to be called."""

    def chunk_done(self, layer: int, index: int, hidden: Tensor) -> None:
        """Residual stream [B, T, C] of chunk *index* behind *layer*, on the device."""

    def stage_begins(self, layer: int, stage: int) -> None:
        """The weights are in place and no chunk has crossed yet."""

    def stage_done(self, layer: int, stage: int) -> None:
        """Every chunk has crossed a stage (a group of experts) of *layer*."""

    def layer_done(self, layer: int, residuals: Iterator[Tensor]) -> None:
        """Every chunk has crossed *layer*; raise to stop the pass.

        *residuals*: residual stream of every chunk in order, read lazily; none are left
        behind the last layer.
        """


@dataclass(kw_only=True, slots=True)
class _Run:
    """A chunk on its way."""

    index: int
    chunk: Chunk
    rows: Tensor | None
    counted: Tensor | None
    flat: Tensor | None
    """Flat indices of the counted rows among B * T; None: all."""
    layer: int = -1
    greenlet: Any = None
    embedded: Tensor | None = None
    entered: tuple[Tensor, ...] = ()
    """Embedding and input of the first layer: the forward's frame keeps them to its end."""
    waiting: Tensor | None = None
    """What stands for its residual stream while it waits for the next layer."""


class LayerPass:
    """Runs passes over one skeleton; hooks are in place while `hooked()` is open."""

    def __init__(
        self,
        skeleton: Skeleton,
        weights: LayerWeights,
        *,
        device: torch.device,
        listener: PassListener,
    ) -> None:
        self._skeleton = skeleton
        self._weights = weights
        self._device = device
        self._listener = listener
        self._residuals: ResidualStore | None = None
        self._start = 0
        self._current: _Run | None = None
        self._main: Any = None
        body = skeleton.body.forward
        self._cache_name = (
            "past_key_values"
            if "past_key_values" in inspect.signature(inspect.unwrap(body)).parameters
            else "cache"
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], residuals: ResidualStore, *, start: int = 0) -> None:
        """Take *chunks* through the layers from *start* on.

        With *start* > 0 the residuals behind layer *start* - 1 are already in the store.

        Raises:
            UsageError: the model does not call its layers once each in order.
        """
        self._residuals, self._start, self._main = residuals, start, getcurrent()
        runs = [self._prepare(index, chunk) for index, chunk in enumerate(chunks)]
        with self._hooked():
            try:
                self._embed(runs)
                for layer in range(start, self._skeleton.num_layers):
                    self._cross(layer, runs)
            finally:
                for run in runs:
                    if run.greenlet is not None and not run.greenlet.dead:
                        run.greenlet.throw(GreenletExit)

    def _prepare(self, index: int, chunk: Chunk) -> _Run:
        rows = None if chunk.rows is None else chunk.rows.to(self._device)
        counted = None if chunk.counted is None else chunk.counted.to(self._device)
        flat = rows
        if counted is not None:
            flat = counted if rows is None else rows[counted]
        run = _Run(index=index, chunk=chunk, rows=rows, counted=counted, flat=flat)
        run.greenlet = greenlet(self._forward)
        return run

    def _embed(self, runs: Sequence[_Run]) -> None:
        """Embed every chunk before the first layer, so that the table can go."""
        if self._start:
            return
        assert self._residuals is not None
        self._weights.acquire_entry()
        table = self._skeleton.body.get_input_embeddings()  # type: ignore[operator]
        forward = type(table).forward
        for run in runs:
            hidden = forward(table, run.chunk.tokens.to(self._device))
            run.embedded = self._residuals.park(run.index, hidden)
        self._weights.release_entry()

    def _cross(self, layer: int, runs: Sequence[_Run]) -> None:
        assert self._residuals is not None
        stages = self._weights.groups(layer)
        for stage in range(len(stages)):
            self._weights.acquire(layer, stage)
            self._listener.stage_begins(layer, stage)
            for run, following in zip(runs, [*runs[1:], None], strict=True):
                if following is not None and stage == 0:
                    self._residuals.prefetch(following.index)
                self._current = run
                run.greenlet.switch(run)
                self._expect(run, layer, stage, len(stages))
            self._listener.stage_done(layer, stage)
            self._weights.release(layer, stage)
        self._listener.layer_done(layer, self._waiting(layer, runs))

    def _waiting(self, layer: int, runs: Sequence[_Run]) -> Iterator[Tensor]:
        assert self._residuals is not None
        if layer == self._skeleton.num_layers - 1:
            return iter(())

        def standing_in(index: int) -> Tensor:
            waiting = runs[index].waiting
            assert waiting is not None
            return waiting

        return self._residuals.states(standing_in)

    def _expect(self, run: _Run, layer: int, stage: int, num_stages: int) -> None:
        last = layer == self._skeleton.num_layers - 1
        done = run.greenlet.dead
        if stage < num_stages - 1:
            fine = not done and run.layer == layer
        else:
            fine = (done and last and run.layer == layer) or (
                not done and not last and run.layer == layer
            )
        if not fine:
            raise UsageError(
                f"{type(self._skeleton.model).__name__} does not call its decoder layers once "
                f"each in order (at layer {layer}); a layer pass cannot take it"
            )

    def _forward(self, run: _Run) -> None:
        """Body of a greenlet: the model's own forward, ended behind the last layer."""
        kwargs: dict[str, Any] = {"use_cache": run.chunk.cache is not None}
        if run.chunk.cache is not None:
            kwargs[self._cache_name] = run.chunk.cache
        self._skeleton.body(input_ids=run.chunk.tokens.to(self._device), **kwargs)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Hooks, experts' calls and the embedding's stand-in, taken off at the end."""
        skeleton = self._skeleton
        with ExitStack() as stack:
            for index, layer in enumerate(skeleton.layers):
                if index < self._start:
                    stack.enter_context(replaced(layer, "forward", _pass_through))
                    continue
                before = layer.register_forward_pre_hook(self._before(index), with_kwargs=True)
                after = layer.register_forward_hook(self._after(index))
                stack.callback(before.remove)
                stack.callback(after.remove)
                for name, module in skeleton.experts(index).items():
                    call = self._experts_call(index, name)
                    stack.enter_context(replaced(module, "_leadline_call", call))
                if self._listener.wants_linears():
                    for name, linear in skeleton.linears(index).items():
                        hook = linear.register_forward_pre_hook(self._linear(index, name))
                        stack.callback(hook.remove)
            table = skeleton.body.get_input_embeddings()  # type: ignore[operator]
            stack.enter_context(replaced(table, "forward", self._embedding))
            rotary = getattr(skeleton.body, "rotary_emb", None)
            if isinstance(rotary, nn.Module):
                stack.enter_context(replaced(rotary, "forward", self._shared_rotary(rotary)))
            yield

    def _embedding(self, ids: Tensor) -> Tensor:
        """Stand-in for the embedding: what `_embed` computed for this chunk."""
        run = self._current
        assert run is not None
        assert self._residuals is not None
        if self._start:
            width = self._skeleton.config.hidden_size
            zero = torch.zeros(1, dtype=self._skeleton.dtype, device=self._device)
            return zero.expand(*ids.shape, width)
        assert run.embedded is not None
        embedded, run.embedded = run.embedded, None
        fetched = self._residuals.fetch(run.index, embedded)
        run.entered = (fetched,)
        return fetched

    def _shared_rotary(self, rotary: nn.Module) -> Callable[..., Any]:
        """Rotary tables once for all chunks of one shape.

        Every paused forward keeps its own: a quarter of a residual stream at a head width
        of 128. A chunk without a cache begins at position 0, so its shape says everything.
        """
        compute = type(rotary).forward
        known: dict[object, Any] = {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._current
            assert run is not None
            if run.chunk.cache is not None:
                return compute(rotary, *args, **kwargs)
            inputs = (*args, *sorted(kwargs.items()))
            key = tuple(_shape_or_value(value) for value in inputs)
            if key not in known:
                known[key] = compute(rotary, *args, **kwargs)
            return known[key]

        return forward

    def _before(self, layer: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del module
            run = self._current
            assert run is not None
            assert self._residuals is not None
            if layer == self._start and layer == 0:
                run.layer = layer
                entered = (*run.entered, hidden_argument(args, kwargs))
                others = (*args[1:], *kwargs.values()) if args else tuple(kwargs.values())
                run.entered = () if _reads_any(others, entered, bool(args)) else entered
                return None
            if layer > self._start:
                if run.layer != layer - 1:
                    raise UsageError(
                        f"{type(self._skeleton.model).__name__} called decoder layer {layer} "
                        f"after layer {run.layer}; a layer pass cannot take it"
                    )
                run.waiting = hidden_argument(args, kwargs)
                self._main.switch()
                run.waiting = None
            run.layer = layer
            hidden = self._residuals.fetch(run.index, hidden_argument(args, kwargs))
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        return hook

    def _after(self, layer: int) -> Callable[..., Any]:
        last = layer == self._skeleton.num_layers - 1

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            del module, args
            run = self._current
            assert run is not None
            assert self._residuals is not None
            hidden = output[0] if isinstance(output, tuple) else output
            self._listener.chunk_done(layer, run.index, hidden)
            if last:
                raise GreenletExit
            _empty(run.entered, hidden)
            run.entered = ()
            parked = self._residuals.park(run.index, hidden)
            return (parked, *output[1:]) if isinstance(output, tuple) else parked

        return hook

    def _experts_call(self, layer: int, module: str) -> Callable[[], ExpertsCall]:
        def call() -> ExpertsCall:
            run = self._current
            assert run is not None
            return ExpertsCall(
                rows=run.rows,
                counted=run.counted,
                listener=self._listener.experts(layer, module),
                groups=self._weights.groups(layer),
                next_group=lambda group: self._main.switch(group),
            )

        return call

    def _linear(self, layer: int, module: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Any, ...]) -> None:
            del linear
            run = self._current
            assert run is not None
            source, tokens = args[0], run.chunk.tokens.numel()
            if run.chunk.cache is not None and source.shape[-2] > tokens:
                # Latents of the document so far, expanded anew: the chunk's are the last.
                source = source[..., -tokens:, :]
            rows = source.flatten(0, -2)
            if run.flat is not None:
                if rows.shape[0] != tokens:
                    raise LeadlineError(
                        f"layer {layer} {module} sees {rows.shape[0]} rows where the chunk has "
                        f"{tokens} tokens; use --targets experts for this family"
                    )
                rows = rows[run.flat]
            self._listener.linear(layer, module, rows, args[0])

        return hook


def _reads_any(others: tuple[Any, ...], entered: tuple[Tensor, ...], positional: bool) -> bool:
    """Whether a layer is also given the embedding apart from its input: later ones will be."""
    known = {tensor.data_ptr() for tensor in entered}
    same = sum(1 for x in others if isinstance(x, Tensor) and x.data_ptr() in known)
    return same > (0 if positional else 1)


def _empty(entered: tuple[Tensor, ...], output: Tensor) -> None:
    """Give back the memory of what a paused forward holds and will not read again.

    A model's forward keeps its embedding in a local variable: a second residual stream
    for every micro-batch of a wave.
    """
    for tensor in entered:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != output.untyped_storage().data_ptr():
            storage.resize_(0)


def _shape_or_value(value: Any) -> object:
    if isinstance(value, tuple):
        return tuple(_shape_or_value(one) for one in value)
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _pass_through(*args: Any, **kwargs: Any) -> Any:
    return hidden_argument(args, kwargs)


@contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """*value* as an instance attribute, in front of the class's own."""
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        object.__delattr__(module, name)
