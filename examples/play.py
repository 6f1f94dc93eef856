"""Run a trained model in a GEM environment with transformers alone, without this library.

    python examples/play.py runs/multiturn/merged --episodes 256

The folder was written by ``export_merged`` (or holds any causal language model with a chat
template). Prints the win rate with its 95 % interval as JSON. This is deployment: messages in, text
out, chat template in between.
"""

import argparse
import json
import random

import gem
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def play(model, tokenizer, env_name: str, episodes: int, *, max_new_tokens: int, seed: int) -> tuple[int, float]:
    """Run ``episodes`` episodes side by side, a turn of all per call; returns the wins and the mean
    return."""
    torch.manual_seed(seed)
    games = [Game(env_name, seed + 1 + i) for i in range(episodes)]
    while live := [game for game in games if not game.over]:
        prompts = [tokenizer.apply_chat_template(g.messages, tokenize=False, add_generation_prompt=True) for g in live]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens
        )
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for game, answer in zip(live, answers, strict=True):
            game.answer(answer)
    return sum(game.rewards[-1] >= 1 for game in games), sum(sum(game.rewards) for game in games) / episodes


class Game:
    """One environment and its messages. GEM uses the global generators: each environment keeps a
    state of its own."""

    def __init__(self, env_name: str, seed: int) -> None:
        self.env, self.rewards, self.over = gem.make(env_name), [], False
        observation, info = self.env.reset(seed)
        self.state = random.getstate(), np.random.get_state()
        self.messages = [{"role": "user", "content": observation + info.get("suffix", "")}]

    def answer(self, text: str) -> None:
        random.setstate(self.state[0])
        np.random.set_state(self.state[1])
        observation, reward, terminated, truncated, info = self.env.step(text)
        self.state = random.getstate(), np.random.get_state()
        self.rewards.append(reward)
        self.over = terminated or truncated
        self.messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": observation + info.get("suffix", "")},
        ]


def main() -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a causal language model and its tokenizer")
    parser.add_argument("--env-name", default="game:GuessTheNumber-v0-easy")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(given.model).eval()
    limits = {"max_new_tokens": given.max_new_tokens, "seed": given.seed}
    wins, reward = play(model, tokenizer, given.env_name, given.episodes, **limits)
    rate, z2n = wins / given.episodes, 1.96**2 / given.episodes
    half = 1.96 / (1 + z2n) * (rate * (1 - rate) / given.episodes + z2n / (4 * given.episodes)) ** 0.5
    centre = (rate + z2n / 2) / (1 + z2n)
    print(json.dumps({"success": rate, "ci95": [centre - half, centre + half], "reward": reward}))


if __name__ == "__main__":
    main()
