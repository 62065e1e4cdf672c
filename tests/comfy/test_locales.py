"""The page's languages: complete, current, and what ComfyUI really serves.

``VITRINE_WRITE_LOCALES=1 pytest tests/comfy/test_locales.py`` writes the files anew after a schema or a table changed.
"""

import os

import pytest

LANGUAGES = ("en", "zh", "ja", "ko")


@pytest.fixture(scope="module")
def locales(comfy):
    from vitrine.nodes import NODES, locales

    if os.environ.get("VITRINE_WRITE_LOCALES"):
        locales.write(NODES)
    return locales


@pytest.fixture(scope="module")
def nodes(comfy):
    from vitrine.nodes import NODES

    return NODES


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_string_is_translated(locales, nodes, language):
    words, needed = locales.table(language), locales.strings(nodes)
    missing = [s for s in needed if not words.get(s, "").strip()]
    assert not missing, f"add to locales/{language}.json: {missing}"
    assert not set(words) - set(needed), f"no node says this any more, remove it from locales/{language}.json"


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_sentences_are_in_their_language(locales, language):
    """A description or tooltip has a space in English; its translation must hold that script, and keep the numbers."""
    first, last = {"zh": ("\u4e00", "\u9fff"), "ja": ("\u3040", "\u9fff"), "ko": ("\uac00", "\ud7af")}[language]
    words = {k: v for k, v in locales.table(language).items() if " " in k}
    foreign = [k for k, v in words.items() if not any(first <= c <= last for c in v)]
    assert len(words) > 200 and not foreign


def test_files_are_what_the_generator_writes(locales, nodes):
    stale = [str(p) for p, text in locales.files(nodes).items() if not p.is_file() or p.read_text("utf-8") != text]
    assert not stale, "run with VITRINE_WRITE_LOCALES=1"


def test_comfyui_serves_every_node_input_and_output(comfy, locales, nodes, tmp_path, monkeypatch):
    import folder_paths
    from app.custom_node_manager import CustomNodeManager

    (tmp_path / "vitrine-pack").symlink_to(locales.FOLDER.parent)
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    served = CustomNodeManager().build_translations()
    assert set(served) == set(LANGUAGES), "ComfyUI takes every folder in locales for a language"
    for language in LANGUAGES:
        table, menu = served[language]["nodeDefs"], served[language]["nodeCategories"]
        (category,) = served[language]["templateWorkflows"]["category"].values()
        assert "Vitrine" in category and (language == "en") == (category == locales.TEMPLATES)
        for node in nodes:
            schema = node.define_schema()
            entry = table[schema.node_id]
            assert entry["display_name"] and entry["description"]
            assert {i.id.replace(".", "_") for i in schema.inputs} <= set(entry["inputs"])
            assert set(entry["outputs"]) == {str(n) for n in range(len(schema.outputs))}
            both = [*entry["inputs"].values(), *entry["outputs"].values()]
            assert all(e["name"] and e["tooltip"] for e in both), schema.node_id
            assert all(menu[part] for part in schema.category.split("/"))


def test_the_page_does_not_read_signs_into_a_text(locales):
    assert locales._plain("a|b {c} @d") == "a{'|'}b {'{'}c{'}'} {'@'}d"
