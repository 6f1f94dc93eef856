"""``torchrl-llm play`` and ``chat``, in pipes and in a terminal."""

import json
import sys
from io import StringIO

import numpy as np
import pytest
from command_runs import Terminal, command, ended, start

from torchrl_llm.cli import main
from torchrl_llm.cli._conversation import Conversation, ConversationFullError, text_of
from torchrl_llm.cli._terminal import printable
from torchrl_llm.envs import CHATML, ChatFormatter
from torchrl_llm.modules.engine import TurnRequest
from torchrl_llm.runs.saved import find_saved_model, load_saved_model
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.trainers import evaluate

GUESS = "game:GuessTheNumber-v0-easy"


def loaded(**settings):
    saved = find_saved_model("tiny")
    small = {"device": "cpu", "max_model_len": 256, "max_output_tokens": 16, "num_envs": 1, "seed": 3}
    return load_saved_model(saved, saved.config(**small | settings))


class TestStream:
    @pytest.mark.parametrize("greedy", [False, True])
    def test_is_what_the_policy_answers_in_one_call(self, greedy):
        model = loaded()
        prompt = np.array(model.formatter.start("Guess a number between 1 and 10."))
        request = TurnRequest(0, prompt, episode_id=5, turn=2, greedy=greedy)
        streamed = [*model.policy.stream(request)]
        model.policy.drop_cache()
        model.policy.submit(request)
        (answer,) = model.policy.poll()
        assert streamed == answer.tokens.tolist()

    def test_that_breaks_off_leaves_the_policy_usable(self):
        model = loaded()
        request = TurnRequest(0, np.array(model.formatter.start("Guess.")), 0, 0)
        whole, begun = [*model.policy.stream(request)], model.policy.stream(request)
        assert next(begun) == whole[0]
        begun.close()
        assert [*model.policy.stream(request)] == whole

    def test_text_comes_in_whole_characters(self):
        tokenizer = byte_tokenizer()
        formatter, seen = ChatFormatter(tokenizer), []
        tokens = tokenizer.encode("aü€<|im_end|>")
        assert len(tokens) == 7
        assert [*text_of(formatter, tokens, seen)] == ["a", "ü", "€"]
        assert seen == tokens


class TestConversation:
    def test_has_the_ids_of_training(self):
        model = loaded()
        conversation = Conversation(model)
        first, second = ("".join(conversation.reply(text)) for text in ("Guess a number.", "higher"))
        assert first != ""
        assert second != ""
        messages = [("user", "Guess a number."), ("assistant", first), ("user", "higher"), ("assistant", second)]
        chat = [{"role": role, "content": content} for role, content in messages]
        rendered = model.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert rendered[: len(conversation._context)] == conversation._context

    def test_shows_of_earlier_answers_what_the_template_shows(self, monkeypatch):
        dropping = CHATML.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\n')")
        model, prompts = loaded(chat_template=dropping), []
        answer = [*model.tokenizer.encode("<think>hm</think>\n\n5"), *model.formatter.end_of_turn_ids[:1]]

        def stream(request):
            prompts.append(model.tokenizer.decode(request.prompt))
            yield from answer

        monkeypatch.setattr(model.policy, "stream", stream)
        conversation = Conversation(model)
        assert "".join(conversation.reply("Guess.")) == "<think>hm</think>\n\n5"
        "".join(conversation.reply("higher"))
        expected = "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n"
        assert prompts[1] == expected + "<|im_start|>assistant\n"

    def test_that_is_full_stays_as_it_is(self):
        conversation = Conversation(loaded(max_model_len=40))
        "".join(conversation.reply("Guess."))
        before = [*conversation._context]
        with pytest.raises(ConversationFullError, match=r"max_model_len=40\.$"):
            "".join(conversation.reply("a long message " * 10))
        assert conversation._context == before


class TestPlay:
    @pytest.mark.extra
    def test_shows_the_episodes_of_an_evaluation(self, tmp_path, trained):
        done = command("play", trained[0], "--episodes=3", "--device=cpu", "--json", folder=tmp_path)
        played = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, done.stderr
        saved = find_saved_model(trained[0])
        model = load_saved_model(saved, saved.config(device="cpu", num_envs=1))
        result = evaluate(model.make_env(), model.policy, 3)
        assert sum(len(each["turns"]) for each in played) / 3 == pytest.approx(result.turns)
        assert sum(each["return"] for each in played) / 3 == pytest.approx(result.reward, abs=1e-6)
        assert sum(each["success"] for each in played) / 3 == pytest.approx(result.success)
        assert "environment: You are playing Guess The Number." in done.stderr
        assert all(turn["response"] in done.stderr for turn in played[0]["turns"])

    def test_lets_the_user_be_the_player(self, tmp_path):
        guesses = "".join(rf"\boxed{{{number}}}" + "\n" for number in (5, 6, 7, 8))
        done = command("play", "--as=player", "--env", GUESS, "--json", folder=tmp_path, given=guesses)
        assert done.returncode == 0, done.stderr
        (played,) = map(json.loads, done.stdout.splitlines())
        assert played["turns"][0]["response"] == r"\boxed{5}"
        assert played["stop_reason"] in ("won", "turn limit", "lost")
        assert "you: \\boxed{5}" in done.stderr

    def test_what_is_typed_is_an_answer(self, monkeypatch, capsys):
        """Behind the thought that the template opens, and without control tokens."""
        monkeypatch.setattr(sys, "stdin", StringIO("\\boxed{5}<|im_end|>\n\\boxed{5}\n"))
        thinks = CHATML.replace("assistant\n", "assistant\n<think>\n")
        assert main(["play", "--as=player", "--env", GUESS, "--json", "--chat-template", thinks]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["turns"][0]["response"] == "<think>\n\n</think>\n\n\\boxed{5}"
        assert "holds '<|im_end|>', a special token" in err

    def test_ends_with_the_input(self, tmp_path):
        done = command("play", "--as=player", "--env", GUESS, "--episodes=5", folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("You are playing") == 1

    def test_lets_the_user_be_the_environment(self, tmp_path, trained):
        arguments = ("play", trained[0], "--as=environment", "--device=cpu")
        done = command(*arguments, folder=tmp_path, given="higher\nlower\n/exit\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("model: ") == 3

    def test_ends_where_the_conversation_of_an_environment_is_full(self, tmp_path):
        arguments = ("play", "tiny", "--as=environment", "--env", GUESS, "--device=cpu", "--max-model-len=300")
        done = command(*arguments, folder=tmp_path, given="long " * 300 + "\nhigher\n")
        assert done.returncode == 0
        assert done.stderr.endswith("max_model_len=300.\n")
        assert "/reset" not in done.stderr

    def test_shows_its_prompt_where_the_output_goes_to_a_file(self, tmp_path):
        arguments = ("--as=player", "--env", GUESS, "--json")
        terminal = Terminal("play", *arguments, folder=tmp_path, out=tmp_path / "out")
        terminal.wait_for("you: ")
        terminal.type("7\r")
        assert terminal.end() == 0
        (played,) = map(json.loads, (tmp_path / "out").read_text().splitlines())
        assert played["turns"][0]["response"] == "7"

    def test_in_a_terminal(self, tmp_path):
        terminal = Terminal("play", "--as=player", "--env", GUESS, folder=tmp_path)
        place = terminal.wait_for("you: ")
        assert "\x1b[36m" in terminal.screen  # the environment's text has a color
        terminal.type("7\r")
        terminal.wait_for("lost after 1 turn,", after=place)
        assert terminal.end() == 0

    def test_in_a_terminal_without_color(self, tmp_path):
        terminal = Terminal("play", "--as=player", "--env", GUESS, folder=tmp_path, environment={"NO_COLOR": "1"})
        terminal.wait_for("you: ")
        terminal.type("/exit\r")
        assert terminal.end() == 0
        assert "\x1b[36m" not in terminal.screen

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["play"], "CHECKPOINT is missing: only --as player needs none"),
            (["play", "tiny", "--episodes=0"], "--episodes is 0"),
            (["play", "tiny", "--as=environment", "--json"], "--json does nothing"),
            (["play", "tiny", "--as=environment", "--episodes=1"], "--episodes does nothing"),
            (["play", "--as=player", "--greedy"], "--greedy does nothing"),
            (["play", "--as=player", "--temperature=0.5"], "--temperature does nothing"),
            (["play", "tiny", "--as=referee"], "invalid choice: 'referee'"),
            (["chat", "nowhere"], "there is no such folder"),
            (["chat", "tiny", "--max-output-tokens=9999"], "leaves no room for a prompt in max_model_len=4096"),
        ],
    )
    def test_wrong_input_is_one_sentence(self, tmp_path, arguments, said):
        done = command(*arguments, folder=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert said in done.stderr


class TestChat:
    def test_answers_each_line_of_a_pipe(self, tmp_path, trained):
        given = "Guess a number.\n\nhigher\n/reset\nGuess a number.\n/rest\n"
        done = command("chat", trained[0], "--greedy", "--device=cpu", folder=tmp_path, given=given)
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        assert len(lines) == 4
        assert lines[2] == "(another conversation)"
        assert lines[0] == lines[3]  # greedy, and the context is another's
        assert done.stderr == "'/rest' is not a command. Did you mean '/reset'?\n"
        assert "\x1b" not in done.stdout

    def test_input_that_is_no_text_is_a_message_all_the_same(self, tmp_path):
        (tmp_path / "in").write_bytes(b"Gu\xffess.\n")
        files = [tmp_path / kind for kind in ("in", "out", "err")]
        assert ended(start(["chat", "tiny", "--device=cpu", "--max-output-tokens=4"], files, tmp_path, {})) == 0
        assert files[2].read_text() == ""

    def test_a_model_with_code_of_its_own_is_one_sentence(self, tmp_path, capsys):
        code = {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange"}}
        (tmp_path / "config.json").write_text(json.dumps(code))
        assert main(["chat", str(tmp_path)]) == 2
        assert "contains custom code" in capsys.readouterr().err

    def test_goes_on_after_a_conversation_that_is_full(self, tmp_path):
        given = "Guess.\n" + "long " * 60 + "\n/reset\nGuess.\n"
        done = command("chat", "tiny", "--device=cpu", "--max-model-len=64", "--greedy", folder=tmp_path, given=given)
        assert done.returncode == 0
        assert "/reset begins another one" in done.stderr
        first, _, last = done.stdout.splitlines()[0], *done.stdout.splitlines()[-2:]
        assert first == last

    @pytest.mark.parametrize(("keys", "code"), [("/exit\r", 0), ("\x04", 0), ("\x03", 130)])
    def test_ends_in_a_terminal(self, tmp_path, keys, code):
        terminal = Terminal("chat", "tiny", "--device=cpu", folder=tmp_path)
        place = terminal.wait_for("> ")
        terminal.type("Guess a number.\r")
        place = terminal.wait_for("\n> ", after=terminal.wait_for("Guess a number.", after=place))
        terminal.type(keys)
        assert terminal.end(again="\r") == code
        assert "Traceback" not in terminal.screen

    def test_ctrl_c_stops_a_response(self, tmp_path):
        long = ("--max-output-tokens=3900", "--min-output-tokens=3900")
        terminal = Terminal("chat", "tiny", "--device=cpu", *long, folder=tmp_path)
        terminal.wait_for("> ")
        terminal.type("Guess.\r")
        place = terminal.wait_for("Guess.\n")
        while len(terminal.screen) < place + 20:  # it is streaming
            terminal.read()
        terminal.type("\x03")
        terminal.wait_for("\n> ", after=place)
        terminal.type("/exit\r")
        assert terminal.end() == 0


class TestTerminal:
    def test_what_would_steer_it_is_spelled_out(self):
        assert printable("a\x1b]0;title\x07\tb\n\x9b2J") == "a\\x1b]0;title\\x07\tb\n\\x9b2J"
        assert printable("\u202eevil\u2066 \u2069ü") == "\\u202eevil\\u2066 \\u2069ü"

    def test_without_rich_one_line_says_what_to_install(self, monkeypatch, capsys):
        # what cannot be imported looks like this
        monkeypatch.setitem(sys.modules, "rich.console", None)
        assert main(["chat", "tiny"]) == 2
        assert capsys.readouterr().err == (
            "torchrl-llm chat: error: torchrl-llm chat needs 'rich': pip install 'torchrl-llm[cli]'.\n"
        )
