"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, TensorRT-LLM and others) through the client ``openai``.

kvbench connects only to the address that the user typed. It reads the key from the environment and never stores it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from kvbench.base.errors import UsageError
from kvbench.base.extras import require
from kvbench.base.visible import without_password
from kvbench.engines.engine import AskedPrompt, EngineError, Reply
from kvbench.store.results import Facts
from kvbench.tasks.prompt import SWITCH

KEYS = ("KVBENCH_API_KEY", "OPENAI_API_KEY")
"""Environment variables with the server's key. The first that is set counts."""
NO_KEY = "none"
"""The text in place of a key, since the client demands one. Servers without keys ignore it."""
RETRIES = 4
"""The most times that the client asks again after 429, 5xx, a cut connection or a timeout, with growing waits."""
FIRST_CHOICES = 5
"""The number of likeliest first tokens that are asked for. OpenAI's interface allows no more."""
Content = TypeVar("Content")
"""The result of a question to the server: an answer, or the names of its models."""


class ServerAnswer(NamedTuple):
    """A server's answer to one prompt.

    new_tokens: the answer's tokens as the server counts them; None if it does not say.
    first: the log-probability of the likeliest first tokens, by their text; {} if the server gives none.
    """

    text: str
    new_tokens: int | None
    first: Mapping[str, float]


class Server:
    """A server that answers prompts.

    url: its address, such as ``http://127.0.0.1:8000/v1``.
    served: the name of the model that it serves.
    timeout_s: the seconds after which an unanswered question counts as failed.
    """

    def __init__(self, url: str, served: str, timeout_s: float) -> None:
        require("openai", "engine=openai")
        import openai

        # messages are stored, too
        self.url, self.served = without_password(url), served
        key = NO_KEY
        for name in KEYS:
            if os.environ.get(name):
                key = os.environ[name]
                break
        # prompts and the key go to this address alone: no redirects, and no proxy from the environment
        http = openai.DefaultHttpxClient(follow_redirects=False, trust_env=False)
        self.client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout_s, max_retries=RETRIES, http_client=http)
        # False once the server has refused to give log-probabilities; they are then no longer asked for
        self.gives_choices = True
        # the model that the first answer named; the lock guards it, since several threads ask
        self.model_said: str | None = None
        self.version = ""
        self.lock = Lock()

    def check(self) -> None:
        """Ask the server for its models and its version. Raises UsageError if it serves no model of that name."""
        models = self._call(self._list_models)
        # a server that lists no models may still serve this one
        if models and self.served not in models:
            raise UsageError(f"served={self.served}: {self.url} serves {', '.join(models)}")
        self.version = self._ask_version()

    def facts(self) -> Facts:
        """Return the facts that identify the server's answers: its model and its version."""
        return {"engine": "openai", "served": self.served, "model_said": self.model_said, "version": self.version}

    def ask(self, prompt: AskedPrompt) -> Reply:
        """Return the server's answer to a prompt. If the server refuses log-probabilities, ask again without them."""
        start = time.perf_counter()
        endpoint = self._chat if prompt.chat else self._complete
        try:
            # pass the flag on: another thread may clear it while this question waits for its answer
            answer = self._call(partial(endpoint, prompt, with_choices=self.gives_choices))
        except NoChoices:
            self.gives_choices = False
            answer = self._call(partial(endpoint, prompt, with_choices=False))
        seconds = time.perf_counter() - start
        return Reply(text=answer.text, new_tokens=answer.new_tokens, seconds=seconds, first=answer.first)

    def close(self) -> None:
        """Close the connection to the server."""
        self.client.close()

    def _list_models(self) -> list[str]:
        """Return the names of the served models; [] from a server that does not list them."""
        import openai

        try:
            return [model.id for model in self.client.models.list().data]
        except openai.NotFoundError:
            return []

    def _ask_version(self) -> str:
        """Return the version that the server says, as vLLM does at /version; '' if it says none."""
        address = self.client.base_url
        root = f"{address.scheme}://{address.netloc.decode()}"
        try:
            client = self.client.with_options(max_retries=1, timeout=5)
            content = client.get(f"{root}/version", cast_to=dict[str, object])
        except Exception:
            # many servers lack this page: no failure here is an error
            return ""
        return str(content.get("version", ""))

    def _complete(self, prompt: AskedPrompt, with_choices: bool) -> ServerAnswer:
        """Return the server's completion of a prompt.

        with_choices: whether the server is asked for the log-probabilities of the first tokens.
        """
        options: dict[str, Any] = {}
        if with_choices:
            options["logprobs"] = FIRST_CHOICES
        response = self.client.completions.create(
            model=self.served,
            prompt=prompt.text,
            max_tokens=prompt.limit,
            stop=list(prompt.stop) or None,
            temperature=0,
            seed=0,
            **options,
        )
        choice = self._check_choice(response)
        return ServerAnswer(
            self._check_text(choice.text), _read_token_count(response), _read_first_of_completion(choice)
        )

    def _chat(self, prompt: AskedPrompt, with_choices: bool) -> ServerAnswer:
        """Return the server's answer to a prompt that it puts into its own chat template.

        with_choices: whether the server is asked for the log-probabilities of the first tokens.
        """
        options: dict[str, Any] = {}
        if with_choices:
            options |= {"logprobs": True, "top_logprobs": FIRST_CHOICES}
        if not prompt.thinking:
            options["extra_body"] = {"chat_template_kwargs": {SWITCH: False}}
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        if prompt.system:
            messages.insert(0, {"role": "system", "content": prompt.system})
        response = self.client.chat.completions.create(
            model=self.served,
            messages=messages,
            max_tokens=prompt.limit,
            stop=list(prompt.stop) or None,
            temperature=0,
            seed=0,
            **options,
        )
        choice = self._check_choice(response)
        text, message = choice.message.content, choice.message
        # some servers give the thought apart, and no content if their tokens ended inside it
        thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        if thought:
            marks = prompt.thought
            text = marks.opening + thought + (marks.closing + text if text else "")
        text = self._check_text(text)
        return ServerAnswer(text, _read_token_count(response), _read_first_of_chat(choice))

    def _check_choice(self, response: Any) -> Any:
        """Return the first choice of a response, which has the answer.

        Raises EngineError if there is none, or if another model than that of earlier answers gave it.
        """
        # the client does not check what the server sent: any field may be missing or of another type
        choices = getattr(response, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise EngineError(f"{self.url} answered without a choice: it is no OpenAI-compatible server, or it failed")
        model = getattr(response, "model", None)
        # the first answer decides, whichever thread asked for it
        with self.lock:
            if self.model_said is None:
                self.model_said = model
        if model != self.model_said:
            raise EngineError(
                f"{self.url} changed its model from {self.model_said} to {model} in the middle: answers of two models "
                "are no row. Start the old one again, or measure under another label="
            )
        return choices[0]

    def _check_text(self, text: object) -> str:
        if text is None:
            raise EngineError(f"{self.url} answered a prompt with null in place of a text", ends_run=False)
        if not isinstance(text, str):
            raise EngineError(f"{self.url} answered with {text!r} in place of a text")
        return text

    def _call(self, question: Callable[[], Content]) -> Content:
        """Call ``question``, which asks the server, and return what it returns.

        Raises EngineError, with the cause and a remedy, in place of the client's errors. Raises NoChoices if the server
        refuses to give log-probabilities.
        """
        import openai

        try:
            return question()
        except (openai.OpenAIError, ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
            # the last five come from the client, which reads any JSON or page as if it were of OpenAI's form
            raise self._explain_error(error) from None

    def _explain_error(self, error: Exception) -> EngineError:
        """Return the error to raise in place of an error of the client, with the cause and a remedy.

        It is NoChoices if the server refuses to give log-probabilities.
        """
        import openai

        place = self.url
        # errors of the client derive from each other, so the special ones are tested before the general ones
        if isinstance(error, openai.APITimeoutError):
            return EngineError(
                f"{place} did not answer within {self.client.timeout} s: raise timeout=, or lower parallel="
            )
        if isinstance(error, openai.APIConnectionError):
            cause = error.__cause__ or error
            return EngineError(f"no answer from {place} ({cause}): is the server running, and the url= right?")
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            return EngineError(f"{place} refused the key ({error.status_code}): set {KEYS[0]} in the environment")
        if isinstance(error, openai.NotFoundError):
            return EngineError(
                f"{place} knows no such page or model ({_read_message(error)}): url= usually ends in /v1, and "
                "served= names the model"
            )
        if isinstance(error, openai.RateLimitError):
            return EngineError(
                f"{place} was asked too often ({_read_message(error)}), also after "
                f"{self.client.max_retries + 1} tries: lower parallel="
            )
        # some servers refuse log-probabilities with a status that means a failure of their own
        if isinstance(error, openai.APIStatusError) and "logprob" in str(error).lower():
            return NoChoices(str(error))
        if isinstance(error, (openai.BadRequestError, openai.UnprocessableEntityError)):
            return EngineError(f"{place} refused a prompt ({_read_message(error)})", ends_run=False)
        if isinstance(error, openai.APIStatusError):
            return EngineError(
                f"{place} failed ({error.status_code}: {_read_message(error)}), also after "
                f"{self.client.max_retries + 1} tries: see the server's log"
            )
        return EngineError(f"{place} answered something else than JSON of OpenAI's form: {_shorten(error)}")


class NoChoices(EngineError):
    """The error if a server refuses to give log-probabilities."""


def _read_first_of_chat(choice: Any) -> Mapping[str, float]:
    """Return the log-probabilities of the likeliest first tokens, by text, from a chat's answer; {} without any."""
    # servers leave out fields that they do not fill in
    content = getattr(getattr(choice, "logprobs", None), "content", None)
    if not content:
        return {}
    # the content has an entry for each place of the answer, the first one in front
    return {top.token: top.logprob for top in content[0].top_logprobs or ()}


def _read_first_of_completion(choice: Any) -> Mapping[str, float]:
    """Return the log-probabilities of the likeliest first tokens, by text, from a completion; {} without any."""
    # the completions API has its own form: a mapping {token: log-probability} for each place of the answer
    by_place = getattr(getattr(choice, "logprobs", None), "top_logprobs", None)
    if by_place and by_place[0]:
        return dict(by_place[0])
    # some servers use the form of chats for completions, too
    return _read_first_of_chat(choice)


def _read_token_count(response: Any) -> int | None:
    """Return the answer's number of tokens as the server counts them; None if it does not say."""
    count = getattr(getattr(response, "usage", None), "completion_tokens", None)
    if isinstance(count, int):
        return count
    return None


def _read_message(error: Any) -> str:
    return _shorten(getattr(error, "message", "") or error)


def _shorten(error: object) -> str:
    """Return the text of an error on one line, cut after 200 characters."""
    text = " ".join(str(error).split())
    if len(text) > 200:
        return text[:200] + "..."
    return text
