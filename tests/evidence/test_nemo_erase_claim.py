"""Which neurons are blocked for every prompt, and that erasing is measured on what it did not train on."""

from vitrine.engine.nemo.erase import EraseConfig
from vitrine.engine.nemo.neurons import NeuronSet
from vitrine.evidence.nemo.attacked import ATTACKS, LONG, NEVER, SURROGATE_SEED, most_frequent
from vitrine.evidence.nemo.probed_model import ORDINARY, STATISTICS, SampleBudget
from vitrine.evidence.nemo.remedies import SEEDS


def test_neurons_of_half_the_pictures_are_blocked_for_every_prompt():
    sets = [NeuronSet({"a": (1, 2), "b": (7,)}), NeuronSet({"a": (2, 3)}), NeuronSet({"b": (7, 8)}), NeuronSet({})]
    assert most_frequent(sets).neurons == {"a": (2,), "b": (7,)}
    assert most_frequent(sets, share=0.75).neurons == {}


def test_what_was_trained_on_is_never_measured():
    budget = SampleBudget()
    surrogates = range(SURROGATE_SEED, SURROGATE_SEED + budget.ordinary)
    assert not set(surrogates) & set(SEEDS)
    trained, measured = range(STATISTICS, STATISTICS + budget.ordinary), range(ORDINARY, ORDINARY + budget.ordinary)
    assert not set(trained) & set(measured)
    assert not set(measured) & set(range(NEVER, NEVER + budget.plants))
    # attacks of the measurement have seeds that no round of the training had
    assert EraseConfig().attack.seed + EraseConfig().rounds < 9000 and LONG not in ATTACKS
