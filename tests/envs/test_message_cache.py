"""MessageCache, and the formatter that keeps its messages in it: what was rendered is bounded by
its size."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.envs import ChatFormatter
from torchrl_llm.envs.message_cache import MessageCache


def ids_of(message, *rest):
    return tuple(message.encode()) + tuple(rest)


class TestMessageCache:
    @settings(max_examples=50)
    @given(calls=st.lists(st.tuples(st.text("ab", max_size=40), st.integers(0, 1)), max_size=40))
    def test_it_is_the_function_and_no_larger_than_it_may_be(self, calls):
        cache = MessageCache(ids_of, max_size=200)
        for message, number in calls:
            assert cache(message, number) == ids_of(message, number)
            assert cache.size == sum(len(ids) + len(key[0]) + 16 for key, ids in cache._known.items()) <= 200

    def test_what_was_asked_for_longest_ago_is_rendered_again(self):
        rendered = []
        # of three
        cache = MessageCache(lambda message: rendered.append(message) or ids_of(message), max_size=60)
        for message in "abcabdacb":
            cache(message)
        assert "".join(rendered) == "abcdcb"

    def test_in_threads(self):
        cache = MessageCache(ids_of, max_size=400)
        messages = [f"{number % 50}" for number in range(4000)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(cache, messages)) == [ids_of(message) for message in messages]
        assert 0 < cache.size == sum(len(ids) + len(key[0]) + 16 for key, ids in cache._known.items()) <= 400


class TestFormatter:
    @pytest.mark.parametrize(("ask", "name"), [("start", "_render_start"), ("feedback", "_render_feedback")])
    def test_long_messages_are_not_all_kept(self, tokenizer, ask, name):
        formatter, rendered = ChatFormatter(tokenizer), []
        render, first = getattr(formatter, name), ([[5]] if ask == "feedback" else [])
        setattr(formatter, name, lambda message, *rest: rendered.append(message[:2]) or render(message, *rest))
        formatter._make_caches()
        messages = [f"{number:2}" + "x" * 20_000 for number in range(40)]
        for message in (*messages, messages[-1], messages[-12], messages[0]):
            getattr(formatter, ask)(*first, message)
        assert rendered == [*(message[:2] for message in messages), " 0"]

    def test_members_of_a_group_are_rendered_once(self, tokenizer):
        formatter = ChatFormatter(tokenizer)
        assert formatter.start("Guess.") is formatter.start("Guess.")
        assert formatter.feedback([5], "Higher.") is formatter.feedback([6], "Higher.")
        assert formatter.feedback([5], "Higher.") is not formatter.feedback([5], "Higher.", role="tool")
