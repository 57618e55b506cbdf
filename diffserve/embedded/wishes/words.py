"""The words people use for what the picture world holds, beyond those that its captions use.

Wordings of one thing stand in one string, divided by "|". No wording means two things.
"""

from __future__ import annotations

from functools import cache

from diffserve.embedded.wishes.phrases import split
from diffserve.world.captions import COLOR_SYNONYMS, PLURALS, SYNONYMS, plural

# "*" marks words that take no article
LOOSE_NAMES: dict[str, str] = {
    "cat": "kitty-cat|kitten|feline|tabby|pussycat|pussy cat|moggy|kitteh|house cat|meowing pet",
    "dog": "pup|doggo|hound|pooch|doggy|doggie|canine|mutt|barking pet|man's best friend",
    "fox": "foxy|vixen|red fox|foxie|foxxo|bushy tailed fox",
    "bear": "bruin|grizzly|grizzly bear|brown bear|bear cub|honey loving bear",
    "panda": "panda bear|bamboo bear|black and white bear|bamboo eater|pandabear",
    "frog": "toad|froggy|froggie|tree frog|bullfrog|croaking thing",
    "monkey": "chimp|ape|macaque|monkee|chimpanzee|cheeky monkey",
    "chicken": "rooster|chook|cockerel|hen bird|farm bird|clucking bird",
    "penguin": "emperor penguin|pingu|antarctic bird|tuxedo bird|pengu|bird in a tuxedo",
    "duck": "ducky|mallard|duckling|quacking bird|duckie|quacker",
    "owl": "barn owl|night owl|hoot owl|owlet|hooting bird|wise old bird",
    "butterfly": "monarch butterfly|flutterby|monarch|winged insect|butter fly",
    "turtle": "tortoise|terrapin|sea turtle|shelled reptile|reptile with a shell",
    "octopus": "octo|eight-armed sea creature|sea creature with eight arms|eight legged sea animal|tentacled creature",
    "crab": "crustacean|hermit crab|crabby|pinchy crab|sideways walker|creature with pincers",
    "fish": "fishy|fishie|goldfish|trout|carp|finned swimmer",
    "dolphin": "porpoise|bottlenose|bottlenose dolphin|flipper|dolfin",
    "whale": "humpback|humpback whale|blue whale|sperm whale|spouting whale|moby dick",
    "shark": "great white|great white shark|hammerhead|jaws|hammerhead shark|fish with scary teeth",
    "pig": "piggy|piglet|hog|swine|oinker|piggie",
    "lion": "lioness|king of the jungle|king of beasts|simba|cat with a mane|maned cat",
    "cactus": "prickly plant|spiky plant|saguaro|succulent with spikes|thorny plant",
    "pine tree": "conifer|cone tree|evergreen|christmas tree|xmas tree|spruce|pine|evergreen tree|tree with needles",
    "palm tree": "palm|coconut tree|coconut palm|tropical tree|date palm",
    "sunflower": "sun flower|yellow flower|tall yellow flower|flower that follows the light",
    "rose": "red rose|red flower|valentine flower|rosebud|thorny flower|valentine's flower",
    "mushroom": "toadstool|shroom|fungus|spotted toadstool|fly agaric",
    "apple": "red apple|teacher's fruit|doctor's fruit|crunchy red fruit|snow white's fruit",
    "orange": "tangerine|mandarin|clementine|orange fruit|navel orange|orange citrus fruit",
    "lemon": "citron|sour yellow fruit|yellow citrus|lemmon|sour citrus",
    "banana": "nana|plantain|curved yellow fruit|bananna|fruit monkeys like",
    "watermelon": "water melon|melon|slice of watermelon|watermelon slice|melon slice",
    "grapes": "bunch of grapes|grape bunch|cluster of grapes|grape cluster|wine fruit|*wine grapes",
    "strawberry": "straw berry|red berry|strawb|berry with seeds|berry for cream",
    "cherries": "cherry|bunch of cherries|*red cherries|*cherrys|twin red fruits",
    "peach": "nectarine|fuzzy fruit|apricot|fuzzy pink fruit|georgia peach",
    "pineapple": "ananas|pine apple|spiky fruit|spiky tropical fruit|prickly fruit",
    "carrot": "orange root vegetable|rabbit food|bugs bunny snack|root vegetable|orange veggie|bunny snack",
    "corn": "*maize|*sweetcorn|*corn on the cob|ear of corn|corn cob|corncob|yellow cob|*sweet corn",
    "pizza": "slice of pizza|pizza slice|cheesy slice|pepperoni slice|pizza pie|italian pie",
    "burger": "cheeseburger|beef patty in a bun|bun with a patty|whopper|big mac|sandwich with a patty",
    "donut": "sweet pastry with a hole|ring shaped pastry|glazed ring|glazed pastry with a hole|dohnut|dough ring",
    "cake": "bday cake|gateau|layer cake|party cake|dessert with candles|birthday dessert|torte",
    "soccer ball": "footy ball|footie ball|futbol|soccerball|black and white ball|fifa ball|ball you kick|"
    "football ball",
    "basketball": "hoops ball|nba ball|basket ball|ball for hoops|b-ball|ball you dunk|bball",
    "balloon": "party balloon|helium balloon|ballon|inflatable balloon|air balloon|balloon on a string",
    "car": "automobile|cab|auto|sedan|motor car|taxi|set of wheels|motorcar|taxi cab",
    "bus": "coach|school bus|omnibus|public bus|city bus|tour bus",
    "bicycle": "pushbike|cycle|two-wheeler|push bike|pedal bike|two wheeler|road bike",
    "rocket": "spaceship|space rocket|rocket ship|spacecraft|rocketship|nasa ship|space ship",
    "sailboat": "ship|yacht|sailing boat|sail boat|dinghy|sailing ship|boat with a sail|vessel",
    "house": "home|cottage|hut|family home|villa|cabin|bungalow",
    "castle": "fortress|palace|chateau|citadel|medieval castle|fort|king's house",
    "moon": "crescent|lunar crescent|half moon|luna|sickle moon",
    "star": "gold star|shooting star|shiny star|five-pointed star|yellow star",
    "sun": "*sunshine|smiling sun|sun with a face|sunny sun|shining sun",
    "fire": "*flames|blaze|campfire|bonfire|inferno|camp fire",
    "diamond": "gemstone|jewel|precious stone|crystal|brilliant|gem stone|sparkly stone",
    "crown": "king's hat|tiara|royal crown|queen's headgear|golden crown|kings crown|royal headpiece|king's headgear",
    "top hat": "magician's hat|gentleman's hat|tophat|abe lincoln hat|cylinder hat|magic hat|victorian hat|"
    "tall black hat",
}  # fmt: skip

IRREGULAR: dict[str, str] = {
    "cactus": "cacti",
    "fungus": "fungi",
    "goldfish": "goldfish",
    "great white": "great whites",
}
HEADS: tuple[str, ...] = (" of ", " with ", " for ", " in ", " on ", " you ", " that ", " monkeys ")

# the colours objects have by nature, said of the object and no business of the background
NATURAL_COLORS: dict[str, str] = {
    "cat": "black|white|ginger|grey", "dog": "brown|black|white", "fox": "red|orange", "bear": "brown",
    "frog": "green", "monkey": "brown", "chicken": "white", "duck": "yellow|green", "owl": "brown",
    "butterfly": "blue|orange", "turtle": "green", "octopus": "pink|orange", "crab": "red", "fish": "blue",
    "dolphin": "grey|blue", "whale": "blue", "shark": "grey", "pig": "pink", "lion": "golden", "cactus": "green",
    "pine tree": "green", "rose": "red", "mushroom": "red", "apple": "red", "lemon": "yellow", "banana": "yellow",
    "grapes": "purple", "strawberry": "red", "peach": "pink", "carrot": "orange", "corn": "yellow", "donut": "pink",
    "balloon": "red", "car": "red|blue|black", "bus": "yellow|red", "rocket": "white|red", "sailboat": "white|blue",
    "house": "white|red|yellow", "castle": "grey", "moon": "yellow|white", "star": "yellow|golden", "sun": "yellow",
    "fire": "orange|red", "diamond": "blue", "crown": "golden|gold|yellow", "top hat": "black",
}  # fmt: skip

# adjectives that a caption drops
ADJECTIVES = (
    "cute|fluffy|adorable|funny|happy|sleepy|lovely|cool|majestic|realistic|cartoon|silly|old|shiny|fancy|friendly|"
    "lonely|"
    "sweet|gorgeous|wild|nice|pretty|magical|beautiful|amazing|awesome|epic|elegant|mysterious|proud|chubby|retro|"
    "vintage|"
    "modern|perfect|colorful|stylish|goofy|grumpy|cheerful|brave|curious|delicate|detailed|stunning|random|famous|"
    "legendary"
)

SIZES: dict[str, str] = {
    "small": "small|tiny|little|lil|teeny|itty-bitty|mini|miniature|smol|wee|teensy|very small|really tiny|pint-sized|"
    "minuscule|super small",
    "large": "large|big|huge|giant|enormous|massive|gigantic|ginormous|humongous|colossal|oversized|very big|"
    "really huge|super big|great big|jumbo",
}

# names of a colour, to be put into a phrase about the background
LOOSE_COLORS: dict[str, str] = {
    "red": "crimson|scarlet|ruby|blood red|fire-engine red|bright red",
    "orange": "amber|pumpkin orange|bright orange|orangey|sunset orange",
    "yellow": "golden yellow|canary yellow|mustard|sunny yellow|bright yellow|yellowish",
    "green": "emerald|lime|olive|forest green|dark green|greenish|mint green",
    "blue": "navy|cobalt|royal blue|dark blue|navy blue|ultramarine|blu",
    "light blue": "baby blue|azure|cyan|powder blue|pastel blue|light-blue|lightblue|soft blue|babyblue",
    "purple": "lilac|plum|lavender|purplish|deep purple|royal purple|aubergine",
    "pink": "bubblegum pink|hot pink|fuchsia|barbie pink|baby pink|rosy|pinkish|salmon pink",
    "brown": "chocolate brown|coffee brown|chestnut|mocha|wooden brown|brownish|hazel",
    "gray": "silver|ash gray|slate|charcoal|concrete gray|greyish|gunmetal",
    "white": "plain white|ivory|paper white|blank white|pure white|all white|clean white",
    "black": "jet black|pitch black|ebony|pitch-black|all black|pure black|midnight black",
}

COLOR_PHRASES = (
    "on a {} background|{} background|{} bg|on {}|with {} behind|in front of a {} wall|background: {}|bg {}|"
    "on a {} backdrop|"
    "with a {} backdrop|make the background {}|against {}|against a {} wall|on plain {}|on solid {}|w/ {} bg|"
    "on a {} colored background|with {} all around|over a {} background|and everything behind is {}|on a {} canvas|"
    "the background should be {}|{} backdrop|in front of {}|background {}|on a flat {} background|on {} paper"
)

# whole phrases that name a colour by what has it
COLOR_ASSOCIATIONS: dict[str, str] = {
    "red": "on a background red like blood|with a background in ferrari red|on a strawberry colored background",
    "orange": "at sunset|in sunset colors|with sunset vibes behind|on a pumpkin colored background|sunset background",
    "yellow": "on a background the color of sunshine|on a lemon colored background|on a custard colored background",
    "green": "on a background the color of grass|on a green screen|on an emerald colored background",
    "blue": "on a background the color of jeans|on a denim colored background|on a sapphire colored background",
    "light blue": "against a clear sky|against the clear daytime sky|in the bright daytime sky|under a clear sky|"
    "sky background",
    "purple": "on a background the color of lavender|on an aubergine colored background|on a plum colored background",
    "pink": "on a barbie colored background|on a background the color of bubblegum|on a flamingo colored background",
    "brown": "on a background the color of chocolate|on a coffee colored background|on a wooden table|on wood",
    "gray": "on a concrete wall|on a background the color of ash|on concrete|on a stone wall",
    "white": "on a blank page|on a sheet of paper|on an empty page|with no background|isolated cutout",
    "black": "in total darkness|in complete darkness|on a background the color of coal|in the dark with nothing behind",
}

LOOSE_PLACES: dict[str, str] = {
    "beach": "by the seaside|at the seashore|on the shore|by the water|on the coast|at the seaside|on the sandy shore|"
    "beachside|on a tropical beach|near the water|on the waterfront|on the sand by the sea|on a beach holiday|"
    "sandy beach",
    "meadow": "in a grassy field|on a lawn|in a pasture|on green grass|in the countryside|in a field|in the fields|"
    "on a prairie|in the park|in the grass|on a grassy plain|in a flowery field|grassy place|on the village green",
    "night sky": "at nighttime|night time|after dark|in outer space|in space|among the stars|under a starry sky|"
    "at midnight|"
    "in the dark of night|up in the stars|against the stars|in the galaxy|during the night|late at night|at nite",
    "desert": "in the sahara|in the dunes|among the dunes|in a dry wasteland|in the hot desert|in the arizona desert|"
    "in the gobi|in a desert landscape|in the middle of the desert|where it never rains|in the sandy wasteland|"
    "desert setting",
    "snow": "in winter|in wintertime|in a blizzard|on a snowy day|in a winter wonderland|in the arctic|"
    "at the north pole|"
    "winter|wintry scene|in the freezing cold|on snowy ground|during a snowstorm|in deep snow|in antarctica",
    "ocean": "underwater|under the sea|on the waves|out at sea|in the pacific|on open water|on the high seas|"
    "in the atlantic|"
    "in deep water|in the deep sea|at the bottom of the sea|swimming in the sea|in the open ocean|below the waves",
    "city": "downtown|in town|in new york|among skyscrapers|on a city street|in a metropolis|in the streets|in nyc|"
    "in front of the skyline|in an urban setting|between skyscrapers|in the middle of town|urban setting|in tokyo",
    "mountains": "in the alps|on a mountain|in the highlands|in the himalayas|on a mountainside|among the peaks|"
    "up a mountain|"
    "with mountains behind|in the rockies|near the peaks|in an alpine landscape|mountain backdrop|up in the mountains",
}  # fmt: skip

TAGS: dict[str, str] = {
    "beach": "beach|seaside|seashore|beach scene", "meadow": "meadow|grass|field|countryside",
    "night sky": "night|night sky|space|nighttime|starry sky", "desert": "desert|sahara|dunes",
    "snow": "snow|winter|snowy|snow landscape", "ocean": "ocean|sea|underwater|open sea",
    "city": "city|urban|downtown|skyline|cityscape", "mountains": "mountains|alps|mountain landscape|mountain",
}  # fmt: skip

CATEGORIES: dict[str, tuple[str, ...]] = {
    "an animal|a pet or wild animal|some animal|any animal|a creature|a critter|some cute animal": (
        "cat", "dog", "fox", "owl", "bear", "panda", "frog", "monkey", "chicken", "penguin", "duck", "butterfly",
        "turtle", "octopus", "crab", "fish", "dolphin", "whale", "shark", "pig", "lion"),
    "a pet|some pet|a furry friend|a household pet": ("cat", "dog"),
    "a sea creature|something that swims|a sea animal|some marine animal|an animal from the sea": (
        "fish", "dolphin", "whale", "octopus", "shark", "crab", "turtle"),
    "a bird|some bird|something with feathers|any bird": ("owl", "penguin", "duck", "chicken"),
    "a farm animal|an animal from the farm|a barnyard animal": ("pig", "chicken", "duck"),
    "a fruit|some fruit|a piece of fruit|any fruit": (
        "apple", "banana", "orange", "lemon", "strawberry", "peach", "pineapple", "watermelon", "grapes", "cherries"),
    "a vegetable|a veggie|some vegetable": ("carrot", "corn"),
    "something to eat|some food|a snack|something tasty|fast food|some junk food": ("pizza", "burger", "donut"),
    "a dessert|something sweet|a sweet treat|some dessert": ("cake", "donut"),
    "a ball|some ball|sports gear|something to play with": ("soccer ball", "basketball"),
    "a vehicle|something to ride|some vehicle|a means of transport": ("car", "bicycle", "bus"),
    "a tree|some tree|any tree": ("pine tree", "palm tree"),
    "a flower|some flower|a blossom|a bloom": ("rose", "sunflower"),
    "a building|some building|a place to live": ("house", "castle"),
    "something royal|something for a king|something precious|a treasure": ("crown", "diamond"),
    "a heavenly body|something in the sky|something from the sky": ("moon", "star", "sun"),
}  # fmt: skip

# what goes with a mood: objects, then backgrounds, the likeliest first
MOODS: dict[str, tuple[str, str]] = {
    "cosy|cozy|snug|homely|comfy": ("cat|dog|owl|fox|fire|house", "night sky|snow|brown"),
    "spooky|scary|creepy|halloween": ("owl|cat|castle|mushroom|moon", "night sky|black|purple"),
    "summery|sunny|tropical|holiday": ("palm tree|crab|pineapple|sailboat|watermelon|sun|turtle", "beach|ocean|yellow"),
    "wintry|icy|frosty|cold|christmassy": ("penguin|pine tree|bear|house|fox|owl", "snow|mountains|white"),
    "romantic|lovey-dovey|valentine": ("rose|cherries|strawberry|diamond|moon|butterfly", "pink|red|night sky"),
    "yummy|tasty|delicious|appetizing": ("cake|donut|pizza|strawberry|burger|peach|cherries", "pink|white|yellow"),
    "sporty|athletic": ("soccer ball|basketball|bicycle|sailboat|dog", "meadow|city|green"),
    "magical|dreamy|fairytale": ("castle|butterfly|star|mushroom|moon|owl|crown", "night sky|purple|pink"),
    "festive|birthday|party": ("cake|balloon|donut|star|crown", "pink|yellow|light blue"),
    "futuristic|sci-fi|spacey": ("rocket|star|moon|octopus|car", "night sky|city|black"),
    "nautical|watery|aquatic": ("whale|dolphin|fish|octopus|sailboat|turtle|shark", "ocean|beach|blue"),
    "fresh|healthy|fruity": ("lemon|apple|orange|strawberry|pineapple|carrot|grapes|banana", "white|light blue|meadow"),
    "royal|posh|luxurious": ("crown|diamond|castle|top hat|lion", "purple|red|black"),
    "springlike|natural|peaceful|calm": ("butterfly|sunflower|duck|frog|rose|turtle", "meadow|light blue|mountains"),
}  # fmt: skip

# where things are at home, the likeliest first; what is not named goes by DEFAULT_HOMES
HOMES: dict[str, str] = {
    "night sky": "moon|star|owl|rocket|fire", "ocean": "octopus|sailboat|whale|dolphin|shark|fish",
    "beach": "crab|palm tree|turtle|pineapple", "meadow": "dog|pig|chicken|sunflower|butterfly|fox|bicycle|mushroom",
    "snow": "penguin|pine tree|house", "desert": "cactus", "city": "car|bus", "mountains": "castle|bear",
    "light blue": "sun|balloon|duck|lemon|banana|orange|apple|corn", "white": "apple|grapes|strawberry|cherries|carrot",
    "green": "panda|monkey|soccer ball|watermelon", "yellow": "pizza|burger|lion", "pink": "cake|donut|cat|rose",
    "purple": "crown|diamond|top hat", "gray": "basketball", "red": "peach", "blue": "frog",
}  # fmt: skip
DEFAULT_HOMES = "light blue|white|meadow|yellow|pink"


@cache
def names_for(name: str) -> tuple[str, ...]:
    """Every wording of an object: its own name and the captions' synonyms first, then the loose ones."""
    return tuple(dict.fromkeys((name, *SYNONYMS.get(name, ()), *split(LOOSE_NAMES[name]))))


@cache
def colors_for(color: str) -> tuple[str, ...]:
    """Every name of a colour."""
    return tuple(dict.fromkeys((color, *COLOR_SYNONYMS.get(color, ()), *split(LOOSE_COLORS[color]))))


@cache
def homes_of(name: str) -> tuple[str, ...]:
    """Backgrounds that suit an object, the likeliest first."""
    own = [background for background, names in HOMES.items() if name in split(names)]
    return tuple(dict.fromkeys((*own, *split(DEFAULT_HOMES))))


@cache
def many(wording: str) -> str:
    """The plural of a wording: its head takes the ending."""
    if wording in PLURALS or wording in IRREGULAR:
        return IRREGULAR.get(wording) or plural(wording)
    cut = min((at for head in HEADS if (at := wording.find(head)) > 0), default=len(wording))
    return plural(wording[:cut]) + wording[cut:]


@cache
def countable_names(name: str) -> tuple[str, ...]:
    """Wordings of an object that can be counted; grapes and cherries come in bunches."""
    if name in PLURALS:
        return (f"bunch of {name}",)
    return tuple(word for word in names_for(name) if not word.startswith("*"))
