"""Names and things that stories and recall passages of the demo model's text are made of; all ours (Apache-2.0)."""

from __future__ import annotations


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
