"""An option is declared once: no node and no command repeats what its settings say, and no range is checked twice."""

import ast
import importlib
import pkgutil

import vitrine.engine
from vitrine.engine.settings.option import Options, settings_of
from vitrine_tests import sources

WIDGETS = {"Float": {float}, "Int": {int}, "Combo": {str}, "Boolean": {bool}, "String": {str}}

OTHERS = {
    "Check.steps": "of the samples, not of the probe's grid",
    "Check.guidance": "of the samples, not of the score",
    "Find.seed": "0 is the calibration's, not a seed",
}
"""Flags with the name of an option that they are not."""


def option_classes():
    """Class name -> class of every settings class of the engine whose fields are options."""
    for info in pkgutil.walk_packages(vitrine.engine.__path__, "vitrine.engine."):
        importlib.import_module(info.name)
    found, waiting = {}, [Options]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("vitrine.engine."):
                found[kind.__name__] = kind
    return found


CLASSES = option_classes()


def classes(nodes):
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def settings_in(node):
    """The settings classes that a class names."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & set(CLASSES)


def kinds(annotation):
    return {annotation, *getattr(annotation, "__args__", ())} - {type(None)}


def repeated_inputs(node):
    """Inputs with a literal default or range, of a node whose settings have an option of that name and type."""
    options = {
        s.name: kinds(s.annotation)
        for name in settings_in(node)
        for s in settings_of(CLASSES[name])
        if s.option.node and s.option.doc
    }
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)):
        widget = getattr(call.func.value, "attr", "")
        if call.func.attr != "Input" or widget not in WIDGETS or not call.args or not call.keywords:
            continue
        name = getattr(call.args[0], "value", None)
        literal = {k.arg for k in call.keywords if isinstance(k.value, (ast.Constant, ast.UnaryOp, ast.BinOp))}
        if literal & {"default", "min", "max"} and options.get(name, set()) & WIDGETS[widget]:
            yield f"{node.name}.{name}"


EXAMPLE = """
class Node:
    def define_schema(cls):
        return [io.Float.Input("effect_fraction", default=0.5), io.Float.Input("other", default=0.5)]
    def execute(cls):
        return SearchConfig()
"""


def test_the_rule_sees_a_repeated_option():
    (node,) = classes(ast.walk(ast.parse(EXAMPLE)))
    assert list(repeated_inputs(node)) == ["Node.effect_fraction"]


def test_nodes_repeat_no_option_of_their_settings():
    repeated = [
        f"{path}: {entry}"
        for path, nodes in sources.walked("nodes").items()
        for node in classes(nodes)
        for entry in repeated_inputs(node)
    ]
    assert not repeated, "take inputs_of(Config, name) (nodes/config_inputs.py)"


def test_settings_of_one_node_share_no_name():
    """``settings_from`` takes values by name: the steps of one class would become those of another."""
    made = {}
    for nodes in sources.walked("nodes").values():
        for node in classes(nodes):
            calls = [
                n for n in ast.walk(node) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "settings_from"
            ]
            made[node.name] = {call.args[0].id for call in calls}
    assert {"ProbeConfig", "SearchConfig"} <= made["NEMOFindNeurons"]
    for name, kinds_made in made.items():
        shown = [s.name for kind in kinds_made for s in settings_of(CLASSES[kind]) if s.option.node]
        assert len(shown) == len(set(shown)), name


def test_commands_repeat_no_option_of_their_settings():
    repeated = []
    for nodes in sources.walked("cli").values():
        for command in classes(nodes):
            options = {s.name for name in settings_in(command) for s in settings_of(CLASSES[name])}
            fields = {f.target.id: f for f in command.body if isinstance(f, ast.AnnAssign) and f.value is not None}
            numbers = {name for name, f in fields.items() if ast.unparse(f.annotation) in ("int", "float", "Count")}
            repeated += [f"{command.name}.{name}" for name in sorted(numbers & options)]
    assert set(repeated) == set(OTHERS), "take flags(Config(), name) (cli/options.py)"


def test_no_range_stands_twice():
    """A class of options compares no field with a number: the option says the range, and makes the message."""
    twice = []
    for path, nodes in sources.walked("engine").items():
        for node in classes(nodes):
            checks = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name in ("_check", "__post_init__")]
            for compared in (n for f in checks for n in ast.walk(f) if isinstance(n, ast.Compare)):
                sides = [compared.left, *compared.comparators]
                fields = {s.attr for s in sides if isinstance(s, ast.Attribute) and ast.unparse(s.value) == "self"}
                numbers = [s for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, (int, float))]
                if node.name in CLASSES and numbers and fields:
                    twice.append(f"{path}: {node.name}.{sorted(fields)}")
    assert not twice and len(CLASSES) > 25
