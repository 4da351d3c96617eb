"""Stories for the demo model, by a seeded generator; everything generated here is ours (Apache-2.0)."""

from __future__ import annotations

import re
from random import Random

from demo_words import COLOURS, FEMALE, JOBS, NAMES, PETS, upper, words

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
