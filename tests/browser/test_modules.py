"""The page's modules, asked in a browser: where they put what a snapshot has, and Markdown."""

import random
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from playwright.sync_api import Page

from engine.values.tree import TreeSnapshot
from server.admin_schema import CacheTree
from tests.cache_scenes import Scene, agent_beside_short_prompts, many_leaves

LAYOUT = """async ([snapshot, mostAlone, top]) => {
  const { layout } = await import("/dashboard/tree/layout.js");
  const { placeOf, ticks } = await import("/dashboard/tree/axis.js");
  const node = snapshot.nodes.find(({ id }) => id === top) ?? null;
  const { axis, rows, namespaces } = layout(snapshot, { top: node, mostAlone });
  const { bars, lanes, rests, folded } = namespaces[0];
  const placed = ({ from, to, ...rest }) => ({
    ...rest, from, to, start: placeOf(axis, from), end: placeOf(axis, to) });
  return { axis, rows, bars: bars.map(placed), lanes: lanes.map(placed), rests, folded,
           ticks: ticks(axis, 9) };
}"""

Laid = Callable[..., Any]
"""What `layout` makes of a picture."""


@pytest.fixture
def laid_out(lasting_page: Page) -> Laid:
    def laid(picture: TreeSnapshot, most_alone: int = 5, top: int | None = None) -> Any:
        snapshot = CacheTree.of(picture, "a/model").model_dump(mode="json")
        return lasting_page.evaluate(LAYOUT, [snapshot, most_alone, top])

    return laid


def test_what_fits_is_to_scale(laid_out: Laid) -> None:
    laid = laid_out(many_leaves())
    assert laid["axis"]["cuts"] == []
    assert all(bar["end"] - bar["start"] == bar["node"]["tokens"] for bar in laid["bars"])
    assert laid["ticks"] == [0, 50, 100, 150, 200, 250, 300, 350, 400]


def test_a_long_prompt_is_cut_and_short_ones_beside_it_are_not(laid_out: Laid) -> None:
    laid = laid_out(agent_beside_short_prompts())
    axis = laid["axis"]
    shared = next(bar for bar in laid["bars"] if bar["node"]["tokens"] == 84)
    assert shared["end"] - shared["start"] == 84 > axis["length"] / 16
    agent = max(laid["bars"], key=lambda bar: bar["node"]["tokens"])
    assert 84 < agent["end"] - agent["start"] < axis["length"] / 2
    assert axis["cuts"][-1]["to"] == 25_000
    assert laid["ticks"][0] == 0
    assert laid["ticks"][-1] == 25_000


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_drawn_out_of_order(laid_out: Laid, seed: int) -> None:
    """Where an axis is not cut it is to scale, and nothing begins or ends in a cut."""
    draw = Random(seed)
    scene = Scene()
    for i in range(60):
        parent = draw.choice([None, *range(max(1, i - 8), i + 1)]) if i else None
        scene.node(parent, int(10 ** draw.uniform(0, 4.5)), holders=draw.choice([0, 1]))
    laid = laid_out(scene.picture(), most_alone=1000)
    cuts = [(cut["from"], cut["to"]) for cut in laid["axis"]["cuts"]]
    assert len(laid["bars"]) == 60
    for bar in laid["bars"]:
        begins, ends = bar["from"], bar["to"]
        assert not any(cut[0] < token < cut[1] for cut in cuts for token in (begins, ends))
        inside = [to - from_ for from_, to in cuts if begins <= from_ and to <= ends]
        drawn = bar["end"] - bar["start"]
        assert 0 < drawn <= ends - begins
        if not inside:
            assert drawn == ends - begins
    places = sorted((bar["to"], bar["end"]) for bar in laid["bars"])
    assert [place for _, place in places] == sorted(place for _, place in places)
    assert max(place for _, place in places) <= laid["axis"]["length"]


def test_what_runs_comes_first(laid_out: Laid) -> None:
    scene = Scene()
    old, busy = scene.node(None, 40), scene.node(None, 60, holders=1)
    quiet = scene.node(busy, 10)
    spoken = scene.node(busy, 20, holders=1)
    scene.request(spoken, 90, 85)
    scene.request(None, 30, 0)
    scene.request(None, 35, 5)
    laid = laid_out(scene.picture())
    assert [bar["node"]["id"] for bar in laid["bars"]] == [busy, spoken, quiet, old]
    rows = {lane["request"]["id"]: lane["row"] for lane in laid["lanes"]}
    row_of = {bar["node"]["id"]: bar["row"] for bar in laid["bars"]}
    assert rows["r1"] < row_of[quiet] < rows["r3"] < row_of[old] < rows["r2"]


def test_a_queue_is_folded_with_its_count(laid_out: Laid) -> None:
    scene = Scene()
    shared = scene.node(None, 60, holders=1)
    for _ in range(6):
        scene.request(None, 30, 0)
    scene.request(shared, 90, 85)
    laid = laid_out(scene.picture())
    assert [lane["request"]["id"] for lane in laid["lanes"]] == ["r7", "r1", "r2"]
    assert [(rest["queued"], rest["from"]) for rest in laid["rests"]] == [(4, 0)]
    assert laid["rows"] == 4


def test_prompts_that_share_nothing_are_folded_but_the_longest(laid_out: Laid) -> None:
    scene = Scene()
    alone = [scene.node(None, 10 + i) for i in range(8)]
    longer = scene.node(scene.node(None, 50), 30)  # one prompt, of two runs
    shared = scene.node(None, 5)
    used = scene.node(None, 6, holders=1)
    behind = [scene.node(shared, 4), scene.node(shared, 3)]
    laid = laid_out(scene.picture(), most_alone=2)
    kept = {alone[-1], longer, longer - 1, shared, used, *behind}
    assert {bar["node"]["id"] for bar in laid["bars"]} == kept
    assert laid["folded"] == {"prompts": 7, "tokens": sum(range(10, 17))}
    whole = laid_out(scene.picture(), most_alone=8 + 1)
    assert len(whole["bars"]) == len(scene.picture().nodes)
    assert whole["folded"]["prompts"] == 0


def test_a_prompt_that_is_computed_does_not_move_the_axis(laid_out: Laid) -> None:
    def computed(n_tokens: int) -> Any:
        scene = Scene()
        shared = scene.node(None, 84, holders=1)
        for i in range(20):
            scene.node(shared, 30 + 5 * i)
        own = scene.node(None, n_tokens, holders=1)
        scene.request(own, 25_000, n_tokens + 40)
        return laid_out(scene.picture())

    axes = [computed(n_tokens)["axis"] for n_tokens in (1_024, 9_216, 24_576)]
    assert axes[0]["cuts"]
    assert axes[0] == axes[1] == axes[2]


def test_a_bar_alone_begins_its_own_axis(laid_out: Laid) -> None:
    scene = Scene()
    top = scene.node(scene.node(None, 20_000), 60)
    for i in range(6):
        scene.node(top, 20 + i)
    laid = laid_out(scene.picture(), top=top)
    assert laid["axis"]["from"] == 20_000
    assert laid["axis"]["cuts"] == []
    assert laid["ticks"][0] == 20_000


def test_a_conversation_of_any_depth_has_places(laid_out: Laid) -> None:
    scene = Scene()
    node = None
    for _ in range(2000):
        node = scene.node(node, 8)
    assert len(laid_out(scene.picture())["bars"]) == 2000


RENDERED = """async (pieces) => {
  const { Markdown } = await import("/dashboard/markdown/markdown.js");
  const { html, render } = await import("/dashboard/parts/html.js");
  const host = document.createElement("div");
  let text = "";
  for (const piece of pieces) render(html`<${Markdown} text=${text += piece} />`, host);
  const { innerHTML, textContent } = host.firstChild;
  const elements = [...host.querySelectorAll(".markdown *")].map((element) => [
    element.localName, Object.fromEntries([...element.attributes].map((a) => [a.name, a.value])),
  ]);
  return { innerHTML, textContent, elements };
}"""
CHARACTERS_READ = """async ([piece, times]) => {
  const { Blocks } = await import("/dashboard/markdown/blocks.js");
  const { Lexer } = await import("/dashboard/vendor/marked.mjs");
  const { lex } = Lexer.prototype;
  let read = 0;
  Lexer.prototype.lex = function (text) { read += text.length; return lex.call(this, text); };
  try {
    const blocks = new Blocks();
    for (let time = 0; time < times; time += 1) blocks.append(piece);
    return read;
  } finally {
    Lexer.prototype.lex = lex;
  }
}"""
SAFE_ATTRIBUTES = {
    "a": {"href", "target", "rel"},
    "ol": {"start"},
    "div": {"class", "tabindex", "role", "aria-label"},
    "pre": {"tabindex", "aria-label"},
    "button": {"type", "class", "aria-label"},
    "span": {"class", "aria-hidden"},
    "th": {"style"},
    "td": {"style"},
}
SAFE_ELEMENTS = {
    *SAFE_ATTRIBUTES,
    *("p", "h3", "h4", "h5", "h6", "ul", "li", "blockquote", "hr", "br", "code"),
    *("strong", "em", "del", "table", "thead", "tbody", "tr"),
}
SEED = 8


@pytest.fixture
def page(lasting_page: Page) -> Page:
    return lasting_page


def rendered(page: Page, *pieces: str) -> Any:
    return page.evaluate(RENDERED, list(pieces))


MARKDOWN = {
    "plain": "<p>plain</p>",
    "one\ntwo": "<p>one\ntwo</p>",
    "one\n\ntwo": "<p>one</p><p>two</p>",
    "# Title": "<h3>Title</h3>",
    "###### Deep": "<h6>Deep</h6>",
    "a **b** *c* ~~d~~": "<p>a <strong>b</strong> <em>c</em> <del>d</del></p>",
    "`a`": "<p><code>a</code></p>",
    "snake_case_name": "<p>snake_case_name</p>",
    "- a\n- b\n  - c": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- [ ] a\n- [x] b": "<ul><li>☐ a</li><li>☑ b</li></ul>",
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "a &lt; b &amp;&amp; c": "<p>a &lt; b &amp;&amp; c</p>",
    r"\*a\*": "<p>*a*</p>",
    "[a *b*](https://x.org/?q=1 'title')": (
        '<p><a href="https://x.org/?q=1" target="_blank" rel="noopener noreferrer">'
        "a <em>b</em></a></p>"
    ),
    "<a@b.org>": (
        '<p><a href="mailto:a@b.org" target="_blank" rel="noopener noreferrer">a@b.org</a></p>'
    ),
}


def test_markdown_is_elements(page: Page) -> None:
    shown = {text: rendered(page, text)["innerHTML"] for text in MARKDOWN}
    assert shown == MARKDOWN


def test_code_has_its_language_and_a_button(page: Page) -> None:
    shown = rendered(page, "```python title\nif a < b:\n    pass\n```")
    assert shown["innerHTML"] == (
        '<div class="code"><span class="name" aria-hidden="true">python</span>'
        '<pre tabindex="0" aria-label="python">'
        "<code>if a &lt; b:\n    pass</code></pre>"
        '<button type="button" class="copy" aria-label="Copy: python">Copy</button></div>'
    )


def test_a_table_keeps_its_columns(page: Page) -> None:
    shown = rendered(page, "Here:\n| a | b |\n|---|--:|\n| 1 | `2` |\n")
    kinds = [kind for kind, _ in shown["elements"]]
    assert kinds.count("th") == kinds.count("td") == 2
    aligned = [attributes for kind, attributes in shown["elements"] if kind == "td"]
    assert aligned == [{}, {"style": "text-align: right;"}]


HOSTILE = [
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](<java\nscript:alert(1)>)",
    "[x](&#106;avascript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:msgbox)",
    "[x](blob:https://x.org/1)",
    "[x](file:///etc/passwd)",
    "[x](/admin/cache/clear)",
    "[x][1]\n\n[1]: javascript:alert(1)",
    "<javascript:alert(1)>",
    "![x](javascript:alert(1))",
    "![x](https://x.org/pixel.png)",
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "<div onclick=alert(1)>a</div>\n\nb",
    "<style>*{display:none}</style>",
    "<iframe src=https://x.org></iframe>",
    "<svg/onload=alert(1)>",
    "a <b onmouseover=alert(1)>b</b>",
    '```x" onclick=alert(1)\ncode\n```',
    '[x](https://x.org/"onclick="alert(1))',
    "| <script>alert(1)</script> |\n|---|\n| [x](javascript:alert(1)) |",
    "- " * 200 + "a",
    ">" * 3000 + "a",
    "[" * 3000,
    "**a*_" * 1000,
    "`" * 3000 + "a",
    "\u202e\u0000\ufffe",
]


def test_hostile_text_is_text(page: Page) -> None:
    for text in HOSTILE:
        check_harmless(rendered(page, text), text)
        check_harmless(rendered(page, *text[:200]), text)
    assert page.title() == "Rootstock"


def check_harmless(shown: Any, text: str) -> None:
    for kind, attributes in shown["elements"]:
        assert kind in SAFE_ELEMENTS, text
        assert set(attributes) <= SAFE_ATTRIBUTES.get(kind, set()), text
        if kind == "a":
            assert attributes["href"].partition(":")[0] in {"http", "https", "mailto"}, text
            assert "noopener" in attributes["rel"], text


def test_what_is_refused_is_shown_as_it_was_written(page: Page) -> None:
    for text in ("[x](javascript:alert(1))", "<script>alert(1)</script>", "a <b>c</b>"):
        assert rendered(page, text)["textContent"] == text


SAMPLE = """# Title

A paragraph with **bold**, `code` and [a link](https://x.org).
Its second line.

1. one
2. two

   - nested

> quoted
> *text*

| a | b |
|---|---|
| 1 | 2 |
| 3 | 4 |

```js
const a = "```";

// a blank line
```
---
~~~
never closed
"""


def test_pieces_come_to_the_same_as_the_whole(page: Page) -> None:
    print(f"seed {SEED}")
    whole = rendered(page, SAMPLE)["innerHTML"]
    assert rendered(page, *SAMPLE)["innerHTML"] == whole
    assert rendered(page, SAMPLE.replace("\n", "\r\n"))["innerHTML"] == whole
    draws = random.Random(SEED)
    for _ in range(20):
        cuts = sorted(draws.sample(range(len(SAMPLE)), 30))
        ends = [*cuts, len(SAMPLE)]
        pieces = [SAMPLE[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
        assert rendered(page, *pieces)["innerHTML"] == whole


def test_an_answer_costs_what_its_blocks_cost(page: Page) -> None:
    """Twice the text takes twice the reading: paragraphs, a list, a line that does not end."""
    for text in ("Some words, and more.\n\n", "- an item of a list\n", "no end "):
        piece = text * 8
        once, twice = (page.evaluate(CHARACTERS_READ, [piece, n]) for n in (400, 800))
        assert once >= 400 * len(piece)
        assert twice < 2.2 * once


def test_what_is_finished_is_not_made_again(page: Page) -> None:
    kept = page.evaluate("""async () => {
      const { Markdown } = await import("/dashboard/markdown/markdown.js");
      const { html, render } = await import("/dashboard/parts/html.js");
      const host = document.createElement("div");
      const show = (text) => render(html`<${Markdown} text=${text} />`, host);
      show("one\\n\\ntwo\\n\\nthr");
      const changes = new MutationObserver(() => {});
      changes.observe(host, { subtree: true, childList: true, characterData: true });
      show("one\\n\\ntwo\\n\\nthree");
      return changes.takeRecords().map(({ target }) => target.textContent);
    }""")
    assert set(kept) == {"three"}


def test_the_page_is_drawn_once_a_frame(page: Page) -> None:
    calls = page.evaluate("""async () => {
      const { oncePerFrame } = await import("/dashboard/parts/frame.js");
      let calls = 0;
      const draw = oncePerFrame(() => (calls += 1));
      const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
      for (let i = 0; i < 100; i += 1) draw();
      await frame();
      const first = calls;
      draw();
      await frame();
      return [first, calls];
    }""")
    assert calls == [1, 2]
