"""The report in a browser: charts are drawn, tables sort, nothing is fetched, no text of a record runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import synthetic

from anyformer.compare.report import build

EVIL = "</script><script>window.pwned=1</script><img src=x onerror=\"window.pwned=1\"><a href='javascript:1'>x</a>"
FIRST = "[...document.querySelectorAll('table.sortable')[0].tBodies[0].rows]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def report(folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(build([*synthetic.wide_run(2), *synthetic.default_run()[9:]]).html(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(browser, report: Path) -> Iterator:
    # one page for all tests: each undoes what it changes, as loading takes longer than everything else
    opened = browser.open(report)
    yield opened
    opened.close()


def choose(page, **values: str) -> None:
    for name, value in values.items():
        page.run(
            f"(() => {{ const s = document.querySelector('select[name={name}]'); s.value = '{value}';"
            " s.dispatchEvent(new Event('change')); })()"
        )


def test_every_chart_is_drawn_without_an_error(page) -> None:
    drawn = page.run(
        "[...document.querySelectorAll('.plot')].map(div => div.querySelectorAll('.main-svg .trace').length)"
    )
    assert len(drawn) == 10
    assert min(drawn) >= 5
    assert page.problems() == []


def test_nothing_is_asked_for_but_the_file(page, report: Path) -> None:
    remote = [address for address in page.requests() if not address.startswith(("data:", "blob:"))]
    assert remote == [report.as_uri()]
    buttons = page.run("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title).join(' ')")
    assert "Download plot" in buttons
    for word in ("Share", "Send", "Cloud", "Studio", "Upload"):
        assert word not in buttons


def test_the_methods_of_the_chart_are_named_beside_their_circles(page) -> None:
    script = """(() => {
      const texts = [...document.querySelector('.plot').querySelectorAll('.annotation-text')];
      const box = (t) => t.getBoundingClientRect();
      return texts.map(t => [t.textContent, box(t).left, box(t).top, box(t).right, box(t).bottom]);
    })()"""
    texts = page.run(script)
    names = [entry for entry in texts if " + " in entry[0]]
    assert len(names) == 9
    assert {"xz 1.68", "better", "chance 8 \u2193"} <= {entry[0] for entry in texts}
    for place, (one, *a) in enumerate(names):
        for two, *b in names[place + 1 :]:
            apart = min(a[2], b[2]) - max(a[0], b[0]) <= 1 or min(a[3], b[3]) - max(a[1], b[1]) <= 1
            assert apart, f"{one} covers {two}"


def test_a_column_sorts_up_and_down_with_gaps_last(page) -> None:
    head = "document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells[3]"
    for direction, reverse in (("ascending", False), ("descending", True)):
        page.run(f"{head}.querySelector('button').click()")
        assert page.run(f"{head}.getAttribute('aria-sort')") == direction
        values = page.run(f"{FIRST}.map(row => row.cells[3].dataset.value)")
        known = [float(value) for value in values if value]
        assert known == sorted(known, reverse=reverse)
        assert values == [*values[: len(known)], *[""] * (len(values) - len(known))]
        assert len(known) == 9
    page.run("document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells[1].querySelector('button').click()")
    names = page.run(f"{FIRST}.map(row => row.cells[1].dataset.value)")
    assert names[0] == "bigbird(block=64) + rope"
    assert page.run(f"{head}.getAttribute('aria-sort')") is None


def test_another_length_moves_the_circles(page) -> None:
    state = """(() => {
      const div = document.querySelector('.plot'), discs = div.data.filter(t => t.meta.role === 'disc');
      const circles = Object.fromEntries(discs.map(t => [t.meta.name, [t.x[0], t.y[0], t.marker.size]]));
      return [div.layout.xaxis.title.text, div.layout.yaxis.title.text, circles];
    })()"""
    x, y, before = page.run(state)
    assert x == "training step: tokens/s at 1024 tokens, log scale"
    assert y.startswith("bits per byte at 256 tokens")
    choose(page, quality="2048", cost="4096", measure="forward")
    x, y, after = page.run(state)
    assert x == "forward: tokens/s at 4096 tokens, log scale"
    assert y.startswith("bits per byte at 2048 tokens")
    assert after["softmax + rope"][1] > before["softmax + rope"][1] + 2
    assert after["reformer + rope"][0] is None, "it ran out of memory there"
    assert after["softmax + learned"][1] is None, "beyond its table"
    choose(page, quality="256", cost="1024", measure="step")
    assert page.run(state)[2] == before


def test_a_chip_hides_its_method_in_every_chart_of_the_panel(page) -> None:
    visible = """[...document.querySelectorAll('.panel')[0].querySelectorAll('.plot')]
      .map(div => div.data.filter(t => String(t.meta.key) === '2').map(t => t.visible))"""
    assert all(shown is not False for chart in page.run(visible) for shown in chart)
    chip = "document.querySelector('.chip[data-key=\"2\"]')"
    page.run(f"{chip}.click()")
    assert page.run(f"{chip}.getAttribute('aria-pressed')") == "false"
    assert all(shown is False for chart in page.run(visible) for shown in chart)
    page.run(f"{chip}.click()")
    assert all(shown is True for chart in page.run(visible) for shown in chart)


def test_a_dark_screen_gets_a_dark_page_at_once(page) -> None:
    colours = """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
      document.querySelector('.plot').layout.font.color, document.querySelectorAll('.plot')[1].data[0].line.color]"""
    day = page.run(colours)
    page.screen(dark=True)
    page.wait(f"{colours}[3] !== '{day[3]}'")
    night = page.run(colours)
    page.screen()
    page.wait(f"{colours}[3] === '{day[3]}'")

    def light(colour: str) -> int:
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    assert light(day[0]) > 700 > 200 > light(day[1])
    assert light(night[0]) < 100 < 600 < light(night[1])
    assert all(a != b for a, b in zip(day, night, strict=True))


def test_a_narrow_screen_needs_no_sideways_scrolling(page) -> None:
    widest = "Math.max(...[...document.querySelectorAll('.plot .main-svg')].map(svg => svg.clientWidth))"
    page.screen(width=380, height=800)
    page.wait(f"{widest} <= 360")
    assert page.run("document.documentElement.scrollWidth") <= 380
    page.screen()
    page.wait(f"{widest} > 900")


def test_no_text_of_a_record_runs(browser, folder: Path) -> None:
    facts = {"label": EVIL, "attention_family": (EVIL,), "position_family": (EVIL,), "model": EVIL, "command": EVIL}
    records = [
        *synthetic.references(),
        synthetic.trial("softmax", "rope", **facts),
        synthetic.failed("gru", "none", "error", EVIL, details=EVIL, index=1),
    ]
    path = folder / "evil.html"
    path.write_text(build(records, notices=[EVIL]).html(), encoding="utf-8")
    opened = browser.open(path)
    try:
        assert opened.run("window.pwned") is None
        assert opened.run("document.images.length + document.querySelectorAll('a, svg a').length") == 0
        assert opened.run("document.querySelector('tbody td.name').firstChild.textContent") == EVIL
        point = "document.querySelector('.plot .main-svg .scatterlayer .point').getBoundingClientRect()"
        x, y = opened.run(f"(() => {{ const b = {point}; return [b.left + b.width / 2, b.top + b.height / 2]; }})()")
        opened.hover(x, y)
        opened.wait("document.querySelector('.plot .hoverlayer .hovertext') !== null")
        assert EVIL[:20] in opened.run("document.querySelector('.plot .hoverlayer').textContent")
        assert opened.run("document.querySelectorAll('.hoverlayer a, .hoverlayer img').length") == 0
        # were the escaping to fail, the policy would still let no foreign script run
        opened.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.pwned=1\">')")
        opened.wait("document.images[0].complete")
        assert opened.run("window.pwned") is None
    finally:
        opened.close()
