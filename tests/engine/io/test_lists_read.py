"""Lists of prompts and tables of labels as spreadsheets, editors and papers write them."""

import json
import re
from pathlib import Path

import pytest
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.prompt_files import read_prompts
from vitrine.engine.io.tables import lines_of, rows_of
from vitrine.engine.pipelines.emd_training import _lines
from vitrine.engine.w2w.space.labels import names_in, parse_labels, read_table

ROOT = Path(__file__).parents[3]
PROMPTS = ["an old face, smiling", "two\nlines", "a \u2028 separator", 'a "sign"']
LABELS = ["VM", "TM", "", "N"]


def quoted(cell):
    return '"' + cell.replace('"', '""') + '"'


def table(separator, head=("Prompt", "Label"), end="\n"):
    rows = [head, *([quoted(p), label] for p, label in zip(PROMPTS, LABELS, strict=True))]
    return end.join(separator.join(row) for row in rows) + end


def objects():
    return [{"caption": p, "type": label} for p, label in zip(PROMPTS, LABELS, strict=True)]


FORMS = {
    "comma.csv": table(","),
    "semicolon.CSV": table(";"),
    "tab.csv": table("\t"),
    "tabs.tsv": table("\t"),
    "excel.csv": "sep=;\r\n" + table(";", end="\r\n"),
    "more.csv": table(",", ("Prompt", "label", "", "")),
    "list.json": json.dumps(objects()),
    "lines.jsonl": "\n".join(map(json.dumps, objects())),
    "readable.json": json.dumps(objects(), ensure_ascii=False, indent=2),
}


def test_every_form_gives_the_same_list(tmp_path):
    for name, text in FORMS.items():
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
            mark = "\ufeff" if encoding == "utf-16-be" else ""
            (tmp_path / name).write_bytes((mark + text).encode(encoding))
            assert read_prompts(tmp_path / name) == (PROMPTS, LABELS), (name, encoding)
    for name, text in {
        "a.txt": "\ufeffone, two\u200b\r\n\r\n\u200e three \xa0\n\ufefffour\u2028five\n",
        "b": "prompt\none, two\nthree\nfour\u2028five",
        "c.json": '["one, two", "\\ufeffthree\\u200b", "four\\u2028five"]',
        "d.jsonl": '"one, two"\n"three"\n\n"four\u2028five"\n',
        "e.csv": 'caption\n"one, two"\nthree\nfour\u2028five',
        "f.tsv": "one, two\nthree\nfour\u2028five",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_prompts(tmp_path / name) == (["one, two", "three", "four\u2028five"], []), name
        assert _lines(tmp_path / name) == ["one, two", "three", "four\u2028five"]


def test_what_is_not_understood_is_refused_by_name(tmp_path):
    refused = {
        "book.xlsx": b"PK\x03\x04", "page.html": b"<p>a", "data.parquet": b"PAR1", "sheet.ods": b"PK",
        "latin.txt": "caf\xe9".encode("latin-1"), "bare16.txt": "ab".encode("utf-16-le"), "zero.csv": b"prompt\na\0b\n",
        "table.txt": b"prompt,label\na face,VM\n", "tabs.txt": b"Caption\tType\na face\tVM\n",
        "list.txt": b'["a", "b"]', "wide.csv": b"prompt\na face, smiling\n", "bare.csv": b"a face,VM\nanother,TM\n",
        "open.csv": b'prompt\n"a\nb\n', "url.csv": b"url,score\nx,1\n", "more.csv": b"prompt,label\na,1\nb,c,2\n",
        "object.json": b'{"a.png": "a face"}', "numbers.json": b"[1, 2]", "nested.json": b'[["a"]]',
        "other.json": b'[{"file": "a.png"}]', "deep.json": b"[" * 90_000, "half.json": b'["a"',
        "run.py": b"a = 1", "half.jsonl": b'"a"\n{"b', "labels.json": b'[{"prompt": "a", "label": ["x"]}]',
        "nothing.txt": b"\n \n",
        "twice.csv": b"prompt,prompt\na,b\n", "empty.csv": b"", "head.csv": b"prompt\n", "empty.json": b"[]",
    }  # fmt: skip
    for name, data in refused.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(VitrineError, match=re.escape(name)):
            read_prompts(tmp_path / name)
    (tmp_path / "one.txt").write_text("one\n")
    with pytest.raises(VitrineError, match="2 or more"):
        read_prompts(tmp_path / "one.txt", 2)
    with pytest.raises(VitrineError, match="prompt file"):
        read_prompts(tmp_path / "none.txt")


def test_there_is_one_reader_of_lists():
    """Nothing else splits a text into lines at what Unicode calls separators, and no command reads a table itself."""
    for path in (p for wing in ("engine", "nodes", "cli") for p in (ROOT / wing).rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        mine = name in ("engine/io/tables.py", "engine/emd/logs.py")  # logs are written and read by one trainer
        assert mine or not re.search(r"csv\.(reader|DictReader)", text), name
        lines = [line for line in text.split("\n") if ".splitlines()" in line]
        assert not lines or name in ("cli/main.py", "engine/w2w/building/map_page.py"), name  # of our own texts


def test_lines_of_nodes():
    assert lines_of(" a \r\n\r\nb\u2028c\rd\x0be\n") == ["a", "b\u2028c", "d\x0be"]
    assert rows_of("a;b\n1;2\n") == [["a", "b"], ["1", "2"]] and rows_of("") == []


def test_label_tables(tmp_path):
    file, names = tmp_path / "labels.csv", ("anna", "bob.SAFETENSORS", "cleo")
    for text in (
        "name,beard,file\nanna,1,a.png\nbob,0,b.png\n",
        "sep=;\r\nname;beard\r\nanna.safetensors;1\r\nbob;0\r\n",
        "\tbeard\nbob\t0\nanna\t1\ncleo\t\n",
    ):
        for encoding in ("utf-8-sig", "utf-16"):
            file.write_bytes(text.encode(encoding))
            assert (
                read_table(file, names)["beard"][:2].tolist() == [1, 0] and read_table(file, names)["beard"][2].isnan()
            )
    for text in (
        "anna,1\nbob,0\n",
        "name,beard\nanna,1\nbob,0\nanna,1\n",
        "name,beard\nanna,inf\n",
        "name,beard\nanna,nan\n",
        "name,beard,beard\nanna,1,2\n",
        "name,beard\nanna,1,2\n",
        "name,,age\nanna,1,2\n",
        "name,beard\n",
        'name,beard\n"anna,1\n',
        "name,beard\nanna,1e999\n",
    ):
        file.write_text(text)
        with pytest.raises(VitrineError, match=r"labels\.csv"):
            read_table(file, names)
    file.write_text("anna,1\nbob,0\n")
    assert names_in(file, 2) == ("anna", "bob")
    file.write_text("name,1\nanna,1\nbob,0\n")
    assert names_in(file, 2) == ("anna", "bob")
    for line in ("anna nan", "anna inf", "anna", "anna x"):
        with pytest.raises(VitrineError, match="label line"):
            parse_labels(line, names)
