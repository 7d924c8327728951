"""The code interpreter by the official Python package, unchanged."""
import base64

import pytest
from e2b_code_interpreter import AsyncSandbox, Sandbox


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox.create(timeout=600) as made:
        yield made


def test_run(sandbox):
    run = sandbox.run_code("print('out')\nx = 41\nx + 1")
    assert (run.text, run.logs.stdout, run.error) == ("42", ["out\n"], None)
    assert sandbox.run_code("y").error.name == "NameError"
    assert sandbox.run_code("x").text == "41"


# What is drawn, and what has to come as its data.
CHARTS = {
    "line": ("plt.plot([1, 2, 3], [2, 4, 8], label='y'); plt.xlabel('Time (s)'); plt.title('T')",
             lambda c: (c.title, c.x_label, c.x_unit, c.elements[0].label, [tuple(p) for p in c.elements[0].points])
             == ("T", "Time (s)", "s", "y", [(1, 2), (2, 4), (3, 8)])),
    "scatter": ("plt.scatter([1, 2], [3, 4], label='p')",
                lambda c: (c.elements[0].label, [tuple(p) for p in c.elements[0].points]) == ("p", [(1, 3), (2, 4)])),
    "bar": ("plt.barh(['a', 'b'], [1, 2])",
            lambda c: [(e.label, e.value) for e in c.elements] == [("a", 1), ("b", 2)]),
    "pie": ("plt.pie([90, 10], labels=['most', 'rest'])",
            lambda c: [(e.label, e.angle, e.radius) for e in c.elements] == [("most", 324, 1), ("rest", 36, 1)]),
    "box_and_whisker": ("plt.boxplot([[1, 2, 3, 4, 20]], tick_labels=['A'])",
                        lambda c: [(e.label, e.min, e.first_quartile, e.median, e.third_quartile, e.max, e.outliers) for e in c.elements]
                        == [("A", 1, 2, 3, 4, 4, [20])]),
    "superchart": ("f, a = plt.subplots(1, 2); a[0].plot([1, 2]); a[1].scatter([1], [2]); f.suptitle('S')",
                   lambda c: (c.title, [e.type.value for e in c.elements]) == ("S", ["line", "scatter"])),
    "unknown": ("plt.imshow([[1, 2], [3, 4]])", lambda c: list(c.elements) == []),
}


# Values that have no form in JSON, or none at all, are shown in the forms that they have.
ODD = {
    "half a character": ('print("a\\ud800"); ["b\\ud800"]', lambda r: (r.logs.stdout, r.results[0].json) == (["a?\n"], ["b?"])),
    "a table of itself": ("import pandas as pd\nx = []; x.append(x)\npd.DataFrame({'a': [x]})", lambda r: r.results[0].html),
    "no numbers": ("[float('nan'), float('inf')]", lambda r: r.results[0].json == [None, None]),
    "lines of text": ("display({'text/plain': ['a', 'b'], 'text/html': 5}, raw=True)", lambda r: (r.results[0].text, r.results[0].html) == ("ab", "5")),
    "a box without data": ("import matplotlib.pyplot as plt\nplt.boxplot([[1, 2, 3], []]); plt.show()",
                           lambda r: [(e.label, e.median) for e in r.results[0].chart.elements] == [("1", 2)]),
    "plotly": ("import plotly.graph_objects as go\ngo.Figure(go.Bar(x=['a'], y=[float('nan')]))",
               lambda r: "application/vnd.plotly.v1+json" in r.results[0].extra),
}


@pytest.mark.parametrize("value", ODD)
def test_odd(sandbox, value):
    code, right = ODD[value]
    run = sandbox.run_code(code)
    assert run.error is None and run.logs.stderr == []
    assert right(run), run


def test_exit(sandbox):
    context = sandbox.create_code_context()
    assert sandbox.run_code("exit()", context=context).error is None
    run = sandbox.run_code("1", context=context)
    assert (run.text, run.error) == ("1", None)
    assert "its code ended it" in "".join(run.logs.stderr)


def test_incomplete(sandbox):
    assert "incomplete" in sandbox.run_code("echo 'a", language="bash").error.value
    assert sandbox.run_code("echo a", language="bash").logs.stdout == ["a\n"]


@pytest.mark.parametrize("kind", CHARTS)
def test_chart(sandbox, kind):
    draw, right = CHARTS[kind]
    run = sandbox.run_code(f"import matplotlib.pyplot as plt\n{draw}\nplt.show()")
    assert run.error is None
    result = run.results[-1]
    assert base64.b64decode(result.png).startswith(b"\x89PNG")
    assert result.chart.type.value == kind
    assert right(result.chart), result.chart.to_dict()


def test_glyphs(sandbox):
    run = sandbox.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.title('Zürich 東京 Москва')\nplt.show()")
    assert (run.logs.stderr, run.results[0].chart.title) == ([], "Zürich 東京 Москва")  # no warning of a missing glyph


def test_images(sandbox):
    for code in ("image.show()", "image", "image.save('/tmp/image.png')"):
        run = sandbox.run_code("from PIL import Image\nimage = Image.new('RGB', (4, 3), 'red')\n" + code)
        data = base64.b64decode(run.results[0].png)
        assert data[16:24] == b"\0\0\0\x04\0\0\0\x03"  # width and height


def test_kinds(sandbox):
    run = sandbox.run_code("""
from IPython.display import HTML, JSON, SVG, Javascript, Latex, Markdown, display
display(HTML('<b>h</b>'), Markdown('*m*'), Latex('$l$'), JSON({'j': 1}), Javascript('1'), SVG('<svg xmlns="http://www.w3.org/2000/svg"/>'))
class Own:
    def _repr_mimebundle_(self, **_): return {'text/plain': 'own', 'application/geo+json': {'type': 'Point'}}
Own()""")
    html, markdown, latex, json, javascript, svg, own = run.results
    assert (html.html, markdown.markdown, latex.latex, json.json, javascript.javascript) == ("<b>h</b>", "*m*", "$l$", {"j": 1}, "1")
    assert "<svg" in svg.svg
    assert own.extra["application/geo+json"] == {"type": "Point"} and own.text == "own"
    assert sandbox.run_code("{'a': [1, float('nan')]}").results[0].json == {"a": [1, None]}


def test_streams_as_it_comes(sandbox):
    told = []
    sandbox.run_code("import time\nfor i in range(3): print(i, flush=True); time.sleep(0.3)", on_stdout=lambda m: told.append(m.line))
    assert told == ["0\n", "1\n", "2\n"]


def test_files(sandbox):
    sandbox.files.write("/home/user/data.csv", "a,b\n1,2\n3,4\n")
    assert sandbox.run_code("import pandas as pd; int(pd.read_csv('data.csv').b.sum())").text == "6"
    sandbox.run_code("pd.DataFrame({'c': [1]}).to_excel('out.xlsx')")
    assert bytes(sandbox.files.read("/home/user/out.xlsx", format="bytes"))[:2] == b"PK"


async def run_async():
    async with await AsyncSandbox.create(timeout=300) as sandbox:
        return (await sandbox.run_code("1 + 1")).text


def test_async():
    import asyncio

    assert asyncio.run(run_async()) == "2"
