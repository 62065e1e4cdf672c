"""An option says its bounds, its message and its help once; what a class of options refuses, and how."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import pytest
from vitrine.engine.errors import VitrineError
from vitrine.engine.settings.option import Option, Options, chosen, help_of, settings_of


@dataclass(frozen=True)
class Baking(Options):
    """How a cake is baked."""

    degrees: Annotated[float, Option("Of the oven.", gt=0, le=300, step=5, remedy="most cakes want 180")] = 180.0
    minutes: Annotated[int | None, Option("Until it is done.", ge=1, unset=0, unset_doc="until it smells")] = None
    mode: Annotated[str, Option("Which heat.", choices=("top", "fan"), details="fan is drier.")] = "top"
    eggs: Annotated[tuple[float, ...], Option("Their weights.", gt=0, lt=100)] = (60.0,)
    name: str = "cake"

    def _check(self) -> None:
        if self.mode == "fan" and self.degrees > 250:
            raise VitrineError("too hot for the fan")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"degrees": 0.0}, r"degrees: given 0\.0; accepted: above 0, 300 or less\. most cakes want 180"),
        ({"degrees": 301.0}, "degrees: given 301"),
        ({"minutes": 0}, r"minutes: given 0; accepted: 1 or more\. leave it out"),
        ({"mode": "fam"}, r"mode: given fam; accepted: top, fan\. Did you mean fan\? the default is top"),
        ({"eggs": (60.0, 100.0)}, "eggs: .*accepted: above 0, below 100"),
        ({"mode": "fan", "degrees": 260.0}, "too hot"),
        ({"degrees": float("nan")}, "Baking degrees: given nan"),
        ({"minutes": 1.5}, "Baking minutes: given 1.5; accepted: a whole number"),
        ({"degrees": True}, "Baking degrees: given True"),
    ],
)
def test_what_is_refused_and_how(wrong, message):
    with pytest.raises(VitrineError, match=message):
        Baking(**wrong)
    with pytest.raises(VitrineError, match=message):
        dataclasses.replace(Baking(), **wrong)


def test_bounds_themselves_are_accepted_and_it_goes_to_a_dict_and_back():
    baking = Baking(300.0, 1, "top", (99.0,))
    assert Baking.from_dict(baking.to_dict()) == baking
    assert Baking(minutes=None).minutes is None


def test_the_docstring_has_an_entry_for_each_option():
    text = Baking.__doc__
    assert text.startswith("How a cake is baked.") and "Attributes:" in text
    assert "mode: Which heat. fan is drier. Accepted: top, fan." in text
    assert "minutes: Until it is done. None: until it smells. Accepted: 1 or more." in text
    assert "name:" not in text, "it is no option"


def test_options_are_chosen_by_name_or_left_out():
    assert [s.name for s in settings_of(Baking)] == ["degrees", "minutes", "mode", "eggs"]
    assert [s.name for s in chosen(Baking, ("mode", "degrees"))] == ["mode", "degrees"]
    assert [s.name for s in chosen(Baking, (), ("eggs", "mode"))] == ["degrees", "minutes"]
    assert help_of(settings_of(Baking)[0].option) == "Of the oven. Accepted: above 0, 300 or less."


def test_an_option_that_is_added_is_a_flag_of_the_command():
    """One line in ``SearchConfig`` is a flag of ``vitrine nemo find``, with its range in the help."""
    import tyro
    from vitrine.cli.options import flags, overrides

    @dataclass(frozen=True)
    class More(Baking):
        sugar: Annotated[float, Option("Spoons.", ge=0, le=9)] = 2.0

    @dataclass(frozen=True)
    class Command:
        """Bakes."""

        baking: Annotated[More, flags(More(degrees=170.0), without=("eggs",), minutes="for_minutes")] = More()
        changes: Annotated[dict, overrides(Baking, "eggs", of="the cook's")] = dataclasses.field(default_factory=dict)

    @dataclass(frozen=True)
    class Whole:
        """Bakes."""

        baking: Annotated[More, flags(More(degrees=170.0), without=("eggs",))] = More(degrees=170.0)

    command = tyro.cli(Command, args=["--for-minutes", "5", "--eggs", "50", "60"])
    assert command.baking == More(degrees=170.0, minutes=5) and command.changes == {"eggs": (50.0, 60.0)}
    assert tyro.cli(Whole, args=["--sugar", "3"]).baking == More(degrees=170.0, sugar=3.0)
    assert tyro.cli(Whole, args=[]).baking == More(degrees=170.0)
    with pytest.raises(VitrineError, match="sugar: given 10"):
        tyro.cli(Whole, args=["--sugar", "10"])
