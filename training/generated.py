"""Generated texts for the demo models, from seeds: stories, and recall passages. All of it is ours (Apache-2.0).

Recall passages are what makes the model useful for an eviction demo: a few facts, much filler, then questions that only
the facts can answer.
"""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple


def words(text: str) -> list[str]:
    """Split a '|'-separated list; keeps the word lists below readable."""
    return [part.strip() for part in text.split("|")]


COLOURS = words(
    "red|blue|green|yellow|black|white|brown|grey|pink|purple|orange|golden|silver|crimson|violet|pale|dark"
)
OBJECTS = words(
    "door|gate|box|chest|locker|safe|cabinet|drawer|suitcase|cupboard|trunk|bicycle|tower|cellar|attic|garage|barn|"
    "boat|wagon|vault|desk|bridge|office|kitchen|library|workshop|garden|warehouse|cottage|tent|train|bag"
)
NAMES = words(
    "Anna|Ben|Clara|David|Emma|Felix|Grace|Hugo|Ida|Jack|Kate|Leo|Maria|Noah|Olga|Peter|Rosa|Simon|Tom|Vera|Walter|"
    "Alice|Bruno|Diana|Edgar|Fiona|George|Helen|Ivan|Julia|Karl|Laura|Martin|Nina|Oscar|Paula|Robert|Sara|Victor|Zoe"
)
FEMALE = set(
    words("Anna|Clara|Emma|Grace|Ida|Kate|Maria|Olga|Rosa|Vera|Alice|Diana|Fiona|Helen|Julia|Laura|Nina|Paula|Sara|Zoe")
)
CITIES = words(
    "Paris|London|Rome|Madrid|Berlin|Vienna|Lisbon|Oslo|Athens|Dublin|Prague|Cairo|Tokyo|Delhi|Lima|Boston|Chicago|"
    "Sydney|Geneva|Venice|Munich|Warsaw|Helsinki|Toronto|Kyoto|Seville|Naples|Bergen|Porto|Havana"
)
PETS = words("dog|cat|parrot|rabbit|turtle|pony|goat|hamster|lizard|goose|owl|fox|monkey|snake|duck|hedgehog|canary")
FOODS = words(
    "soup|bread|rice|cheese|fish|honey|apples|noodles|pancakes|salad|cake|potatoes|beans|grapes|eggs|chocolate|"
    "cherries|mushrooms|pumpkin|porridge|lemons|carrots"
)
JOBS = words(
    "baker|teacher|doctor|farmer|painter|sailor|carpenter|nurse|tailor|gardener|lawyer|singer|pilot|miller|"
    "writer|cook|builder|clerk|driver|hunter"
)


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]


STORY = {
    "open": words(
        "Once upon a time there was a {adj} {job} named {n} who lived {place}.|"
        "{n} was a {adj} {job} who lived {place}.|"
        "{time}, {n} walked {place} and thought about {wish}.|A {adj} {job} called {n} had a small house {place}.|"
        "In a village {place} lived a {job} whose name was {n}.|{time}, a {adj} {job} named {n} woke up early.|"
        "There was once a {job} named {n}, and everybody {place} knew {him}.|"
        "{n} and {m} were friends who lived {place}."
    ),
    "sky": words(
        "The sun was {sun} and the wind was {wind}.|It was {season}, and the air smelled of {smell}.|"
        "The day was {wind} and {sun}.|A {wind} rain fell on the roofs.|The sky was {sun}, and the birds were quiet.|"
        "Snow lay on the fields, and the {road} was {wind}.|The leaves were turning {colour}, for it was {season}."
    ),
    "want": words(
        "{n} wanted to find {thing}.|More than anything, {n} wished for {wish}.|{n} had lost {thing} and was very sad.|"
        "{he} had promised {m} to bring {thing} before {evening}.|{n} needed {thing}, because {reason}.|"
        "One day {n} heard that {thing} was hidden {place}.|"
        "{m} had asked {n} for {thing}, and {n} did not want to refuse."
    ),
    "go": words(
        "So {he} took {food} and went along the {road}.|So {he} put on {his} {colour} coat and left the house.|"
        "{he} walked for a long time until {he} came to a {adj2} {spot}.|"
        "{he} asked everybody on the {road}, but nobody knew.|"
        "After an hour {he} reached the {spot} and sat down to rest.|"
        "{he} looked behind the {spot}, but there was nothing.|"
        "Then {he} crossed the {spot} and followed the {road} into the hills."
    ),
    "meet": words(
        "There {he} met {m}, who was carrying {food}.|"
        "On the way {he} saw a {adj2} {animal} that could not find its way home.|"
        '"Where are you going?" asked {m}.|"Can you help me?" asked {n}. "I am looking for {thing}."|'
        "Under a tree sat an old {job2} with a {animal}.|A {animal} looked at {him} and did not run away.|"
        '"I have not seen it," said {m}, "but the {job2} may know."|'
        '"It is late," said the {job2}. "Come in and eat some {food}."'
    ),
    "trouble": words(
        "But the {spot} was dark, and {n} was afraid.|Then the wind grew {wind}, and {he} could not see the {road}.|"
        "Suddenly {he} heard a noise near the {spot}.|But the door was locked, and nobody had the key.|"
        "The {animal} had run away with {food}, and {n} laughed.|Then {he} fell and hurt {his} foot.|"
        "The {job2} was angry and did not want to listen.|But the water was too deep, and there was no boat."
    ),
    "help": words(
        '{m} took {his} hand and said, "Do not be afraid."|Together they lifted the stone and looked under it.|'
        'The {animal} showed them the way through the {spot}.|"We can do it together," said {m}.|'
        "{n} shared {his} {food} with the {animal}.|{m} had an idea and tied a rope to the {spot}.|"
        "They waited until morning, and then they tried again.|{n} told the truth, and the {job2} smiled."
    ),
    "end": words(
        "In the end they found {thing} near the {spot}.|At last {n} came home with {thing}, tired but happy.|"
        "{he} gave {thing} to {m}, and {m} thanked {him}.|That {evening} they sat by the fire and ate {food}.|"
        "When {n} came home, {thing} was lying on the table.|From that day on {n} and {m} were good friends.|"
        "Everybody {place} heard about it, and there was a great feast."
    ),
    "close": words(
        "{n} never forgot that day.|And {he} learned that {moral}.|Since then {n} has always said that {moral}.|"
        '{he} slept well that night.|"You see," said {m}, "{moral}."|And that is how {n} found out that {moral}.|'
        "The next morning the sun was {sun} again."
    ),
    "adj": words("young|old|poor|clever|kind|quiet|brave|lazy|cheerful|proud|patient|curious|shy|honest|tired"),
    "adj2": words("small|large|old|strange|quiet|broken|beautiful|narrow|lonely|friendly|wet|hungry|thin"),
    "job": JOBS,
    "job2": JOBS,
    "animal": PETS,
    "colour": COLOURS,
    "place": words(
        "by the river|near the forest|at the edge of the town|on the hill|by the sea|behind the mill|"
        "in the valley|near the old church|in a narrow street|beside the lake|across the bridge"
    ),
    "time": words(
        "One morning|One evening|On a cold day|Last summer|Early in the spring|On the first day of the year|"
        "Many years ago|Late at night|After the harvest|On market day"
    ),
    "wish": words(
        "a warm house|a good friend|a long journey|a garden of {his} own|the open sea|a quiet life|"
        "a piece of land|a new pair of shoes|the songs of {his} mother"
    ),
    "thing": words(
        "the lost key|the {colour} book|an old map|the silver ring|the {colour} lamp|"
        "a letter from {his} father|"
        "the bell of the church|a basket of {food}|the broken clock|the music box|the {colour} stone"
    ),
    "sun": words("bright|low|pale|warm|clear|grey|golden|hidden"),
    "wind": words("cold|gentle|strong|soft|icy|mild|wild"),
    "season": words("early spring|the middle of summer|late autumn|the first week of winter|harvest time"),
    "smell": words("bread|rain|wet grass|apples|smoke|the sea|flowers|snow"),
    "road": words("road|path|narrow street|river bank|dusty road|stony path"),
    "spot": words("bridge|mill|well|barn|garden|old wall|cave|spring|tower|market|ruined house|harbour|wood|orchard"),
    "food": words("bread|cheese|soup|apples|cake|honey|nuts|milk|pears|fish|bread and butter|a pot of tea"),
    "evening": words("evening|night|sunset|winter"),
    "reason": words(
        "the winter would be long|{his} sister was ill|the roof was broken|the guests were coming|"
        "nobody else would do it|the king had asked for it|{he} had given {his} word"
    ),
    "moral": words(
        "a friend is worth more than gold|it is better to ask than to wander|patience opens many doors|"
        "a small gift can bring great joy|two can carry what one cannot|nobody is too small to help|"
        "the truth is the shortest way|a promise must be kept|fear makes the night darker than it is"
    ),
}
PLAN = ("open", "sky", "want", "go", "meet", "trouble", "help", "end", "close")
REPEATS = {"go": 2, "meet": 3, "trouble": 2, "help": 2, "end": 2}


def story(rng: Random) -> list[str]:
    """One short story as a list of sentences; its people keep their names and pronouns throughout."""
    hero, friend = rng.sample(NAMES, 2)
    she = hero in FEMALE
    fixed = {
        "n": hero,
        "m": friend,
        "he": "she" if she else "he",
        "him": "her" if she else "him",
        "his": "her" if she else "his",
        "thing": "",
        "spot": "",
        "animal": "",
        "job": "",
        "job2": "",
    }
    for slot in ("thing", "spot", "animal", "job", "job2"):
        fixed[slot] = expand(rng, rng.choice(STORY[slot]), fixed)
    sentences = []
    for part in PLAN:
        if part == "sky" and rng.random() < 0.4:
            continue
        for pattern in rng.sample(STORY[part], rng.randint(1, REPEATS.get(part, 1))):
            sentences.append(upper(expand(rng, pattern, fixed)))
    return sentences


def expand(rng: Random, pattern: str, fixed: dict[str, str]) -> str:
    """Fill the {slots} of `pattern`, innermost last; `fixed` wins over a random choice."""
    while match := re.search(r"\{(\w+)\}", pattern):
        value = fixed.get(match[1]) or rng.choice(STORY[match[1]])
        pattern = pattern[: match.start()] + value + pattern[match.end() :]
    return re.sub(r"\b([Aa]) (?=[aeioAEIO])", r"\1n ", pattern)


class Span(NamedTuple):
    """A piece of a document; `weight` is how much its tokens count in the loss."""

    text: str
    weight: float = 1.0


MARKS = ["Remember: ", "Note this: ", "Important: ", "Remember this: ", "Keep in mind: "]


class Fact(NamedTuple):
    """One fact: how it may be told, how it may be asked, and `lead`, which the answer follows."""

    tells: tuple[str, ...]
    asks: tuple[str, ...]
    lead: str
    answer: str


def number_fact(rng: Random, key: str) -> Fact:
    """A fact with a four-digit value about `key`, such as 'red door'."""
    code = "".join(rng.choice("0123456789") for _ in range(4))
    lead = f"The code of the {key} is"
    tells = (f"the code of the {key} is {code}.", f"the {key} has the code {code}.", f"the {key} opens with {code}.")
    asks = (f"What is the code of the {key}?", f"Which code does the {key} have?", f"How do you open the {key}?")
    return Fact(tells, asks, lead, code)


def person_fact(rng: Random, name: str) -> Fact:
    """A fact with a one-word value about a person."""
    kind = rng.randrange(4)
    if kind == 0:
        value = rng.choice(CITIES)
        return Fact(
            (f"{name} lives in {value}.", f"the home of {name} is in {value}."),
            (f"Where does {name} live?", f"In which city does {name} live?"),
            f"{name} lives in",
            value,
        )
    if kind == 1:
        value = rng.choice(PETS)
        return Fact(
            (f"the pet of {name} is a {value}.", f"{name} has a pet, a {value}."),
            (f"What is the pet of {name}?", f"Which pet does {name} have?"),
            f"The pet of {name} is a",
            value,
        )
    if kind == 2:
        value = rng.choice(FOODS)
        return Fact(
            (f"the favourite food of {name} is {value}.", f"{name} likes {value} more than any other food."),
            (f"What is the favourite food of {name}?", f"What does {name} like to eat?"),
            f"The favourite food of {name} is",
            value,
        )
    value = rng.choice(JOBS)
    return Fact(
        (f"{name} works as a {value}.", f"the trade of {name} is that of a {value}."),
        (f"What is the work of {name}?", f"What does {name} do?"),
        f"{name} works as a",
        value,
    )


def draw_facts(rng: Random, count: int, used: set[str]) -> list[Fact]:
    """Distinct facts; `used` holds the subjects that other passages in the same row already took."""
    facts: list[Fact] = []
    while len(facts) < count:
        number = rng.random() < 0.6
        key = f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}" if number else rng.choice(NAMES)
        if key in used and (number or len(used) < 20):
            continue
        used.add(key)
        facts.append(number_fact(rng, key) if number else person_fact(rng, key))
    return facts


def recall_passage(
    rng: Random,
    filler: list[str],
    facts: list[Fact],
    plain: float,
    weight: float,
    questions: int,
    late: bool = False,
    review: float = 0.0,
) -> list[Span]:
    """Facts between `filler` sentences, then questions and weighted answers.

    `plain` is the chance that a fact is told in the words of its answer (the easy case). `late` tells facts in the
    first third only, so that the answer lies almost the whole passage back. `review` is the chance, at each sentence,
    of a question in the midst of the filler: facts then matter all along, not only at the end.
    """
    share = 3 if late else 1
    slots = sorted(rng.randrange(len(filler) // share + 1) for _ in facts)
    told = rng.sample(facts, len(facts))
    spans: list[Span] = []
    for index in range(len(filler) + 1):
        while slots and slots[0] == index:
            slots.pop(0)
            fact = told.pop()
            tell = fact.tells[0] if rng.random() < plain else rng.choice(fact.tells)
            mark = rng.choice(MARKS) if rng.random() < 0.8 else ""
            spans.append(Span((mark + tell if mark else upper(tell)) + " "))
        if index < len(filler):
            spans.append(Span(filler[index] + " "))
            known = [fact for fact in facts if fact not in told]
            if review and known and rng.random() < review:
                spans += question(rng, rng.choice(known), plain, weight)
    for fact in rng.sample(facts, min(questions, len(facts))):
        spans += question(rng, fact, plain, weight)
    spans[-1] = Span(".")
    return spans


def question(rng: Random, fact: Fact, plain: float, weight: float) -> list[Span]:
    ask = fact.asks[0] if rng.random() < plain else rng.choice(fact.asks)
    return [Span(f"{ask} {fact.lead}"), Span(f" {fact.answer}", weight), Span(". ")]
