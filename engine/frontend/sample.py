"""One sequence as the user sees it: the core's tokens with their text, log-probabilities and reason to end.

Text is made when somebody looks (`output`), many tokens at a time where nobody looked for a while. Only stop strings
force it token by token, because the token that completes one must be the last.
"""

from __future__ import annotations

from io import StringIO

from engine.core.wire import SequenceDelta
from engine.frontend.detokenizer import Detokenizers
from engine.frontend.stop import StopMatcher
from engine.frontend.tokenizer import Tokenizer
from engine.request import CompletionOutput, FinishReason, Logprob, LogprobsAt, SamplingParams
from engine.step import TokenLogprobs


class Sample:
    """Grows by `extend` until `finish_reason` is set; `output` gives all of it, or what is new since the last look."""

    def __init__(
        self,
        index: int,
        core_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        detokenizers: Detokenizers,
    ) -> None:
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.latest: float | None = None
        """when its latest tokens came"""
        self.moves = 0
        """from core to core"""
        self._index = index
        self._params = params
        self._tokenizer = tokenizer
        self._stop_reason: int | str | None = None
        self._stop_token: bool = False
        self._text = StringIO()  # a string that is an attribute is copied by each +=
        self._fresh = ""
        """of the text, what nobody has been shown"""
        self._detokenizer = (
            detokenizers.begin(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else None
        )
        stops = params.stop_strings
        self._matcher = StopMatcher(stops, include_stop=params.include_stop_str_in_output) if stops else None
        self._raw_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[LogprobsAt] = []
        self._cumulative_logprob = 0.0
        self._found: tuple[float, float] | None = None
        """beam search: cumulative log-probability and score"""
        self._decoded = 0
        self._shown_tokens = 0
        self._shown_end = False

    def append(self, token_id: int) -> bool:
        """Take in one token that says nothing else. False, and nothing is done, where that could end the sequence."""
        if self._matcher is not None:
            return False
        self.token_ids.append(token_id)
        return True

    def extend(self, delta: SequenceDelta) -> bool:
        """Take in what is new. True when a stop string ended the sequence while the core still runs it."""
        self._raw_logprobs.extend(delta.logprobs)
        if delta.cumulative_logprob is not None and delta.score is not None:
            self._found = delta.cumulative_logprob, delta.score
        stopped = False
        if self._matcher is None:
            self.token_ids.extend(delta.token_ids)
        else:
            stopped = self._extend_until_stop(delta)
        if stopped:
            return delta.finish_reason is None
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_token_id, delta.error)
        return False

    def finish(self, reason: FinishReason, stop_token_id: int | None = None, error: str | None = None) -> None:
        self.finish_reason = reason
        self._stop_token = stop_token_id is not None
        if stop_token_id is not None and stop_token_id in (self._params.stop_token_ids or ()):
            self._stop_reason = stop_token_id  # an EOS that the user did not name is no reason worth telling
        elif error is not None:
            self._stop_reason = error
        if self._matcher is not None:
            self._advance_text(len(self.token_ids))

    def fail(self, error: str) -> None:
        """End it where it stands, with what was rendered before: nothing of it is decoded any more."""
        self.finish_reason, self._stop_reason, self._stop_token = "error", error, False
        self._detokenizer = self._matcher = None
        del self._raw_logprobs[len(self._logprobs) :]

    def failed(self, error: str) -> CompletionOutput:
        """What there is of it after that, or after its output could not be rendered."""
        self.fail(error)
        return CompletionOutput(
            index=self._index,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=error,
        )

    @property
    def text(self) -> str:
        """As far as somebody has looked."""
        return self._text.getvalue()

    @property
    def score(self) -> float:
        """Sum of the log-probabilities of its tokens, where they were asked for."""
        return sum(entry.logprobs[0] for entry in self._raw_logprobs)

    def output(self, delta: bool) -> CompletionOutput | None:
        """All so far; with `delta` what is new since the last call, None when nothing is."""
        if self._matcher is None:
            self._advance_text(len(self.token_ids))
        wants_logprobs = self._params.logprobs is not None
        if wants_logprobs:
            self._convert_logprobs()
        ended = self.finish_reason is not None
        if delta and len(self.token_ids) == self._shown_tokens and not (ended and not self._shown_end):
            return None
        first_token, text = (self._shown_tokens, self._fresh) if delta else (0, self.text)
        self._shown_tokens, self._fresh, self._shown_end = len(self.token_ids), "", ended
        cumulative, score = self._found or (self._cumulative_logprob if wants_logprobs else None, None)
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=cumulative,
            logprobs=self._logprobs[first_token:] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            score=score,
        )

    def _extend_until_stop(self, delta: SequenceDelta) -> bool:
        """Token by token; what follows the token that completed a stop string never happened."""
        for i, token in enumerate(delta.token_ids):
            self.token_ids.append(token)
            if delta.stop_token_id is not None and i == len(delta.token_ids) - 1:
                return False  # `finish` decides whether its text shows
            self._advance_text(len(self.token_ids))
            if self._matcher is not None and self._matcher.matched is not None:
                surplus = len(delta.token_ids) - 1 - i
                if surplus and self._raw_logprobs:
                    del self._raw_logprobs[-surplus:]
                self.finish_reason, self._stop_reason = "stop", self._matcher.matched
                return True
        return False

    def _advance_text(self, upto: int) -> None:
        """Text of the tokens before `upto`. A stop token shows only when stop strings are to be shown."""
        if self._detokenizer is None:
            return
        if self.finish_reason is None and self._matcher is None:  # most tokens
            fresh, self._decoded = self.token_ids[self._decoded : upto], upto
            if fresh:
                self._add_text(self._detokenizer.append(fresh))
            return
        ended = self.finish_reason is not None
        hide_last = ended and self._stop_token and not self._params.include_stop_str_in_output
        fresh = self.token_ids[self._decoded : upto - 1 if hide_last else upto]
        finishes_now = ended and not self._shown_end
        if not fresh and not finishes_now:
            return
        self._decoded = upto
        text = self._detokenizer.append(fresh) if fresh else ""
        if finishes_now:
            text += self._detokenizer.flush()
        if self._matcher is None or upto <= self._params.min_tokens:
            self._add_text(text)
            return
        self._add_text(self._matcher.feed(text))
        if self._matcher.matched is not None and ended:
            # The last bytes completed it, or the end of the sequence set them free.
            self.finish_reason, self._stop_reason = "stop", self._matcher.matched
        elif ended:
            self._add_text(self._matcher.flush())

    def _add_text(self, text: str) -> None:
        self._text.write(text)
        self._fresh += text

    def _convert_logprobs(self) -> None:
        for entry in self._raw_logprobs[len(self._logprobs) :]:
            self._logprobs.append(to_logprobs(entry, self._tokenizer))
            self._cumulative_logprob += entry.logprobs[0]


def to_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsAt:
    """The token in question first, then the alternatives, most likely first; one that is both keeps the first place."""
    chosen = entry.token_ids[0]
    converted = {chosen: Logprob(entry.logprobs[0], entry.rank, tokenizer.token_text(chosen))}
    for i in range(1, len(entry.token_ids)):
        token = entry.token_ids[i]
        if token != chosen:
            converted[token] = Logprob(entry.logprobs[i], i, tokenizer.token_text(token))
    return converted
