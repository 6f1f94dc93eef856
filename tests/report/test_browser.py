"""The page in a real browser: headless Chromium, driven by selenium."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path

import pytest
from recorded_runs import PAYLOADS, made_rows, thinking_rows, tool_rows, write_metrics, write_result, write_rows
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def driver():
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(paths["chromedriver"]))
    browser.set_page_load_timeout(LIMIT)
    browser.set_script_timeout(LIMIT)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a run with payloads in the texts: the last token of the first message, and of
    each first response."""
    run = tmp_path_factory.mktemp("run")
    write_metrics(run)
    write_result(run, env_name=PAYLOADS[0])
    pieces = {token: f" word{token}" for token in range(50)}
    pieces |= dict(enumerate(PAYLOADS, start=50)) | {60: " needle"}
    for number in range(2):
        rows = made_rows(8, 4, 48, first=8 * number, groups=2, seed=number)
        # one message, and one response, for all
        rows[keys.TOKENS][:, :12] = rows[keys.TOKENS][:1, :12]
        rows[keys.TOKENS][:, 3] = 50 + torch_range(8) % 6
        rows[keys.TOKENS][:, 11] = torch_range(8) % 2 + 50
        rows[keys.TOKENS][5, 20] = 60
        rows[keys.turn_extra("regret")] = torch_range(4) * 0.25 + rows[keys.TURN_REWARD] * 0
        rows[keys.turn_extra("state")] = torch_range(8).unsqueeze(-1) * 0 + torch_range(4)
        texts = {1: PAYLOADS[1], 2: "cell 2", 3: PAYLOADS[5]}
        write_rows(run, rows, f"iteration-{number + 1:012d}", iteration=number + 1, pieces=pieces, texts=texts)
    return write_report(run)


def torch_range(size):
    return made_rows(size)[keys.EPISODE_ID]


@pytest.fixture
def opened(driver, page):
    """Opens a view of the page; the test fails if the browser logged anything."""

    def open_view(name: str):
        driver.get("about:blank")
        driver.get(f"{page.as_uri()}#{name}")
        until(driver, "document.body.dataset.ready === 'true'")
        return driver

    driver.get_log("browser")
    yield open_view
    assert driver.get_log("browser") == []


def until(driver, condition: str) -> None:
    """Wait until a JavaScript expression is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, LIMIT).until(lambda browser: browser.execute_script(f"return ({condition})"), condition)


def texts(driver, selector: str) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)", selector
    )


def click(driver, selector: str) -> None:
    driver.execute_script("document.querySelector(arguments[0]).click()", selector)


@pytest.mark.parametrize("view", ["summary", "episodes", "trees", "then-and-now"])
@pytest.mark.parametrize("width", [400, 1400])
def test_every_view_opens_without_an_error_and_fits(opened, view, width):
    driver = opened("summary")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver = opened(view)
    until(driver, f"document.querySelector('#view-{view}').textContent.trim().length > 40")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    visible = driver.execute_script(
        "return [...document.querySelectorAll('main > section:not([hidden])')].map((s) => s.id)"
    )
    assert visible == [f"view-{view}"]
    assert texts(driver, ".top nav a[aria-current]") == [view.replace("-", " ").capitalize()]


class TestEpisodes:
    @pytest.fixture
    def driver_at(self, opened):
        driver = opened("episodes")
        until(
            driver, "document.querySelectorAll('.token').length > 0 && document.querySelectorAll('.list li').length > 0"
        )
        return driver

    def shades(self, driver):
        return driver.execute_script(
            "return [...document.querySelectorAll('.token')].map((t) => t.className + t.style.getPropertyValue('--a'))"
        )

    def test_a_switch_changes_the_shading(self, driver_at):
        seen = {}
        for name in ("credit", "ratio", "log_prob", "entropy", "kl", "clipped", "none"):
            click(driver_at, f"[data-shade={name}]")
            until(driver_at, f"document.querySelector('[data-shade={name}]').getAttribute('aria-pressed') === 'true'")
            seen[name] = tuple(self.shades(driver_at))
        assert len(set(seen.values())) == len(seen)
        assert set(seen["none"]) == {"token"}

    def test_the_colors_are_drawn(self, driver_at):
        colors = driver_at.execute_script(
            "return [...document.querySelectorAll('.token')].map((t) => getComputedStyle(t).backgroundColor)"
        )
        assert len(set(colors)) > 1

    def test_an_outcome_filters(self, driver_at):
        assert len(texts(driver_at, ".list li")) == 16
        driver_at.execute_script(
            "const s = document.querySelector('[aria-label=Outcome]'); s.value = 'won'; s.dispatchEvent(new Event('change'))"
        )
        until(driver_at, "document.querySelectorAll('.list li').length === 8")
        assert all(text.startswith("won") for text in texts(driver_at, ".list li"))

    def test_the_text_is_searched(self, driver_at):
        driver_at.find_element("css selector", "input[type=search]").send_keys("NEEDLE")
        until(driver_at, "document.querySelectorAll('.list li').length === 2")
        click(driver_at, ".list button")
        until(driver_at, "document.querySelectorAll('.token.found').length + "
              "[...document.querySelectorAll('.env')].filter((e) => e.textContent.includes('needle')).length > 0")  # fmt: skip

    def test_an_order_sorts(self, driver_at):
        driver_at.execute_script(
            "const s = document.querySelector('[aria-label=Order]'); s.value = 'worst'; s.dispatchEvent(new Event('change'))"
        )
        until(driver_at, "document.querySelector('.list .value').textContent === '0'")
        returns = [float(value) for value in texts(driver_at, ".list .value")]
        assert returns == sorted(returns)
        assert len(set(returns)) > 1

    def test_keys_move_through_the_list(self, driver_at):
        order = driver_at.execute_script(
            "return [...document.querySelectorAll('[data-episode]')].map((b) => b.dataset.episode)"
        )
        here = driver_at.execute_script("return document.querySelector('.list [aria-current]').dataset.episode")
        step, key = (1, "j") if order.index(here) + 1 < len(order) else (-1, "k")
        body = driver_at.find_element("css selector", "body")
        body.send_keys(key)
        wanted = order[order.index(here) + step]
        until(driver_at, f"document.querySelector('.list [aria-current]').dataset.episode === '{wanted}'")
        until(driver_at, f"location.hash === '#episodes/{wanted}'")
        body.send_keys("s")
        until(driver_at, "document.querySelector('[data-shade=ratio]').getAttribute('aria-pressed') === 'true'")
        body.send_keys("3")
        until(driver_at, "location.hash === '#trees'")

    def test_a_token_says_its_numbers(self, driver_at):
        click(driver_at, ".token")
        until(driver_at, "!document.querySelector('#readout').hidden")
        (said,) = texts(driver_at, "#readout")
        assert all(name in said for name in ("weight", "ratio", "log-prob", "entropy", "KL to reference"))


class TestTrees:
    def test_they_unfold(self, opened):
        driver = opened("trees")
        until(driver, "document.querySelectorAll('.tree details').length > 0")
        closed = "[...document.querySelectorAll('.tree details:not([open])')]"
        before = driver.execute_script(f"return {closed}.length")
        assert before > 0, "turns of single episodes begin folded"
        driver.execute_script(f"{closed}.at(0).querySelector('summary').click()")
        until(driver, f"{closed}.length === {before - 1}")
        driver.execute_script("[...document.querySelectorAll('#view-trees button')].at(0).click()")
        until(driver, f"{closed}.length === 0")

    def test_visits_add_up(self, opened):
        """Every child of a fork is visited as often as episodes go through it."""
        driver = opened("trees")
        until(driver, "document.querySelectorAll('.tree details').length > 0")
        first = driver.execute_script(
            "return [...document.querySelectorAll('.tree > li > details > summary .num:nth-of-type(1)')]"
            ".map((n) => parseInt(n.textContent))"
        )
        assert sum(first) == 4


class TestThenAndNow:
    def test_two_recordings_of_a_task_are_side_by_side(self, opened):
        driver = opened("then-and-now")
        until(driver, "document.querySelectorAll('.panes h3').length === 2")
        chosen = driver.execute_script(
            "return ['then', 'now'].map((n) => document.querySelector(`[aria-label=${n}]`).selectedOptions[0].textContent)"
        )
        assert chosen == ["iteration 1", "iteration 2"]


class TestUntrustedText:
    @pytest.mark.parametrize("view", ["episodes", "trees", "then-and-now"])
    def test_no_payload_runs(self, opened, view):
        driver = opened(view)
        until(driver, f"document.querySelector('#view-{view}').textContent.includes('document.title=')"
              if view != "episodes" else "document.querySelectorAll('.token').length > 0")  # fmt: skip
        for number in range(8) if view == "episodes" else ():
            driver.execute_script(f"location.hash = '#episodes/{number}'")
            until(driver, f"document.querySelector('.list [aria-current]')?.dataset.episode === '{number}'")
        assert driver.title != "run"
        assert (
            driver.execute_script("return document.querySelectorAll('main img, main script, main iframe').length") == 0
        )

    def test_a_payload_is_shown_as_it_is(self, opened):
        driver = opened("episodes/0")
        until(driver, "document.querySelectorAll('.token').length > 0")
        assert any(PAYLOADS[0] in text for text in texts(driver, ".env pre"))
        (title,) = texts(driver, "h1")
        assert PAYLOADS[0] in title

    def test_the_policy_would_stop_a_script_that_slipped_through(self, driver, page):
        """The page's own defense, tried with the escape taken away."""
        script = "<script>document.title='run'</script>"
        broken = page.with_name("broken.html")
        broken.write_text(page.read_text().replace("<main>", f"<main>{script}"))
        driver.get(broken.as_uri())
        until(driver, "document.body.dataset.ready === 'true'")
        assert driver.title != "run"
        assert "Content Security Policy" in driver.get_log("browser")[0]["message"]

    def test_the_policy_names_the_page_s_script(self, page):
        text = page.read_text()
        script = text.rpartition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in text


def test_the_scheme_follows_the_system_and_the_button(opened):
    driver = opened("summary")
    schemes = []
    for wanted in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": wanted}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver = opened("summary")
        schemes.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
    click(driver, "#theme")
    schemes.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert schemes[0] == schemes[2] != schemes[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(opened, scheme):
    """WCAG's contrast of 4.5 to 1, of every color of text on every ground, shaded fully too."""
    driver = opened("summary")
    driver.execute_script("document.documentElement.dataset.theme = arguments[0]", scheme)
    colors = driver.execute_script(
        """
        const node = document.body.appendChild(document.createElement("span"));
        node.style.setProperty("--a", 1);
        const of = (name, value) => { node.style[name] = value; return getComputedStyle(node)[name]; };
        const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
        const rgb = (...layers) => { for (const c of layers) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); } return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
        const ground = (name) => of("backgroundColor", `var(--${name})`);
        const shade = (kind) => { node.className = kind; node.style.backgroundColor = ""; return getComputedStyle(node).backgroundColor; };
        const grounds = ["bg", "panel"].map(ground);
        const shaded = grounds.flatMap((g) => ["pos", "neg", "seq"].map((kind) => rgb(g, shade(kind))));
        const inks = Object.fromEntries(["ink", "muted", "accent"].map((name) => [name, rgb(of("color", `var(--${name})`))]));
        node.remove();
        return { inks, grounds: grounds.map((g) => rgb(g)), shaded };
        """
    )
    pairs = [(ink, ground) for ink in colors["inks"].values() for ground in colors["grounds"]]
    pairs += [(colors["inks"]["ink"], ground) for ground in colors["shaded"]]
    assert len({tuple(ground) for ground in colors["shaded"]}) == 6
    assert [pair for pair in pairs if contrast(*pair) < 4.5] == []


def contrast(first: list[int], second: list[int]) -> float:
    """WCAG 2's contrast of two colors."""

    def luminance(color: list[int]) -> float:
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def test_thinking_and_what_was_there_before_are_folded(driver, tmp_path):
    rows, pieces = thinking_rows()
    write_metrics(tmp_path)
    write_result(tmp_path)
    write_rows(tmp_path, rows, pieces=pieces)
    driver.get("about:blank")
    driver.get(f"{write_report(tmp_path).as_uri()}#episodes/0")
    until(driver, "document.querySelectorAll('#view-episodes .detail .model').length === 3")
    thoughts = driver.find_elements("css selector", "details.thinking")
    assert [each.get_attribute("open") for each in thoughts] == [None] * 3
    summaries = texts(driver, "details.thinking > summary")
    left = ", which later turns do not see"
    assert [left in each for each in summaries] == [True, True, False]
    said = texts(driver, "details.thinking pre")
    assert [each.replace("\u21b5", "").strip() for each in said] == [
        f"<think>\nturn {turn}\n</think>" for turn in range(3)
    ]
    answers = texts(driver, "#view-episodes .model > pre")
    assert [each.strip() for each in answers] == [f"{turn}<|im_end|>" for turn in range(3)]
    assert [each.endswith("tokens from before") for each in texts(driver, "details.seen > summary")] == [True, True]
    # Searched text is shown.
    driver.execute_script(
        "const box = document.querySelector('input[type=search]');"
        "box.value = 'turn 1'; box.dispatchEvent(new Event('input'))"
    )
    until(driver, "document.querySelectorAll('details.thinking')[1]?.open")
    assert driver.get_log("browser") == []


def open_calls(driver, folder, kept=lambda text: text):
    """Open the episode of :func:`tool_rows`, of whose texts ``kept`` says what is left."""
    rows, pieces, found = tool_rows()
    write_metrics(folder)
    write_result(folder)
    write_rows(folder, rows, pieces=pieces, texts={key: kept(text) for key, text in found.items()})
    driver.get("about:blank")
    driver.get(f"{write_report(folder).as_uri()}#episodes/0")
    until(driver, "document.querySelectorAll('#view-episodes .detail .model').length === 5")


def test_calls_of_tools_are_cards(driver, tmp_path):
    open_calls(driver, tmp_path)
    turns = driver.find_elements("css selector", "#view-episodes .model")
    cards = [[card.text.split("\n") for card in turn.find_elements("css selector", ".call")] for turn in turns]
    assert cards[0] == [["look", "place", place, "markup", "<i>"] for place in ("here", "there")]
    ((name, *fields),) = cards[1]
    assert (name, fields[0], fields[2]) == ("no call", "text", "not read")
    assert cards[2:] == [[], [], []]
    assert "tool_calls_json" not in driver.find_element("css selector", "#view-episodes .detail").text
    assert driver.get_log("browser") == []


def test_a_list_of_calls_that_was_cut_is_a_card_that_says_so(driver, tmp_path):
    open_calls(driver, tmp_path, lambda text: text[:-5] if "here" in text else text)
    (card,) = driver.find_element("css selector", "#view-episodes .model").find_elements("css selector", ".call")
    name, label, text, _, reason = card.text.split("\n")
    assert (name, label, reason) == ("no call", "text", "it was cut, because it is too long to be kept")
    assert text.startswith('[{"name": "look"')


def test_extras_of_environments_are_in_the_lanes_and_at_the_turns(opened):
    driver = opened("episodes/2")
    until(driver, "document.querySelector('#view-episodes .detail .text')")
    detail = driver.find_element("css selector", "#view-episodes .detail")
    lanes = {row.text.split("\n")[0].split()[0]: row for row in detail.find_elements("css selector", ".lanes tbody tr")}
    assert lanes["regret"].text.split() == ["regret", "0", "0.25", "0.5", "0.75"]
    cells = [cell.text for cell in lanes["state"].find_elements("css selector", "td")]
    assert cells[:3] == ["\u2013", PAYLOADS[1], "cell 2"]
    turns = [each.text for each in detail.find_elements("css selector", ".model .who")]
    assert "regret 0.5" in turns[2]
    assert "state cell 2" in turns[2]
    assert "state" not in turns[0]
