"""The sentences that wishes are made of, each in a part for training and a part that only held-out wishes use.

{a}, {b} and {c} stand for the objects, in the order in which the answer names them; {where} for the background.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


@cache
def split(wordings: str) -> tuple[str, ...]:
    """The wordings of a string, which "|" divides."""
    return tuple(wordings.split("|"))


class Phrases(NamedTuple):
    """Wordings to train with, and wordings kept for the test; "|" divides them."""

    training: str
    kept: str

    def side(self, *, held_out: bool) -> tuple[str, ...]:
        """The wordings of one side."""
        return split(self.kept if held_out else self.training)


RELATIONS: dict[str, Phrases] = {
    "left of": Phrases(
        "{a} to the left of {b}|{a} left of {b}|{a} on the left of {b}|{a} on the left and {b} on the right|"
        "{a} left, {b} right|{a} with {b} to its right|{a} with {b} on the right|{a}, and to its right {b}|"
        "{a} standing left of {b}|left: {a}, right: {b}|{a} on the left side, {b} on the right side|"
        "to the left of {b} is {a}|{a} and on its right side {b}|{a} placed to the left of {b}|"
        "{a} who has {b} on the right|on the left {a}, on the right {b}|{a} is left from {b}|left of {b} sits {a}|"
        "{a} (left) and {b} (right)|{a} at left, {b} at right|{a} that has {b} to its right",
        "{a} to the left and {b} to the right|{a} with {b} standing on its right|"
        "on the left side {a}, on the right side {b}|"
        "{a} sits left of {b}|left is {a}, right is {b}|to the left of {b} there's {a}|{a} positioned left of {b}",
    ),
    "right of": Phrases(
        "{a} to the right of {b}|{a} right of {b}|{a} on the right of {b}|{a} on the right and {b} on the left|"
        "{a} right, {b} left|{a} with {b} to its left|{a} with {b} on the left|{a}, and to its left {b}|"
        "{a} standing right of {b}|right: {a}, left: {b}|{a} on the right side, {b} on the left side|"
        "to the right of {b} is {a}|{a} and on its left side {b}|{a} placed to the right of {b}|"
        "{a} who has {b} on the left|on the right {a}, on the left {b}|{a} is right from {b}|right of {b} sits {a}|"
        "{a} (right) and {b} (left)|{a} at right, {b} at left|{a} that has {b} to its left",
        "{a} to the right and {b} to the left|{a} with {b} standing on its left|"
        "on the right side {a}, on the left side {b}|"
        "{a} sits right of {b}|right is {a}, left is {b}|to the right of {b} there's {a}|{a} positioned right of {b}",
    ),
    "above": Phrases(
        "{a} above {b}|{a} over {b}|{a} on top of {b}|{a} sits on top of {b}|{a} sitting on {b}|{a} floating above {b}|"
        "{a} up high and {b} down low|{a} at the top, {b} at the bottom|{a} hovering over {b}|{a} on {b}|"
        "{a} balancing on {b}|{a} higher than {b}|above {b} there is {a}|{a} is above {b}|{a} stacked on {b}|"
        "{a} with {b} below it|{a} with {b} underneath|top: {a}, bottom: {b}|on top of {b} sits {a}|"
        "{a} placed over {b}|"
        "{a} and below it {b}|{a} atop {b}|{a} standing on top of {b}",
        "{a} hovering above {b}|{a} at the top and {b} at the bottom|{a} perched on {b}|{a} sits above {b}|"
        "above {b} sits {a}|"
        "{a} with {b} under it|{a} is on top of {b}",
    ),
    "below": Phrases(
        "{a} below {b}|{a} under {b}|{a} beneath {b}|{a} underneath {b}|{a} is under {b}|{a} hiding under {b}|"
        "{a} down low and {b} up high|{a} at the bottom, {b} at the top|{a} lower than {b}|{a} with {b} above it|"
        "{a} with {b} on top|{a} with {b} over it|under {b} there is {a}|{a} that has {b} on top of it|"
        "bottom: {a}, top: {b}|underneath {b} sits {a}|{a} placed under {b}|{a} and above it {b}|{a} sitting below {b}|"
        "{a} carrying {b} on top|{a} right under {b}",
        "{a} is below {b}|{a} at the bottom and {b} at the top|{a} sits under {b}|below {b} sits {a}|"
        "{a} hiding beneath {b}|"
        "{a} with {b} sitting on top|{a} placed underneath {b}",
    ),
    "next to": Phrases(
        "{a} next to {b}|{a} beside {b}|{a} and {b}|{a} & {b}|{a} + {b}|{a} by {b}|{a} with {b}|{a} near {b}|"
        "{a} plus {b}|"
        "{a} side by side with {b}|{a} and {b} together|{a} hanging out with {b}|{a} close to {b}|{a} alongside {b}|"
        "both {a} and {b}|{a} meets {b}|{a} playing with {b}|{a} standing beside {b}|{a} accompanied by {b}|{a} n {b}|"
        "{a} and also {b}|{a} together with {b}|{a} right next to {b}|{a} with {b} beside it|{a} at the side of {b}",
        "{a} sitting next to {b}|{a} chilling with {b}|{a} and {b} side by side|{a} in the company of {b}|"
        "{a} standing by {b}|"
        "{a} close by {b}",
    ),
    "between": Phrases(
        "{a} between {b} and {c}|{a} in between {b} and {c}|{a} flanked by {b} and {c}|"
        "{a} in the middle of {b} and {c}|"
        "{b} and {c} with {a} between them|{a} sandwiched between {b} and {c}|{a} surrounded by {b} and {c}|"
        "{a} stuck between {b} and {c}|{b} on one side, {c} on the other, {a} in the middle|{a} btw {b} and {c}|"
        "{a} in the centre, {b} and {c} on its sides|{a} with {b} on one side and {c} on the other|"
        "{b}, then {a} in the middle, then {c}|{a} standing between {b} and {c}|between {b} and {c} there is {a}|"
        "{a} that has {b} and {c} on either side",
        "{a} sitting between {b} and {c}|{a} in the middle, {b} and {c} on its sides|{a} squeezed between {b} and {c}|"
        "between {b} and {c} sits {a}|{b} and {c}, {a} in between|{a} placed between {b} and {c}",
    ),
}

TOGETHER = Phrases(
    "{a}, {b} and {c}|{a}, {b}, {c}|{a} and {b} and {c}|{a} with {b} and {c}|{a} + {b} + {c}|{a} plus {b} plus {c}|"
    "{a} & {b} & {c}|{a}, {b}, and {c}|{a} and {b} and also {c}|{a} hanging out with {b} and {c}|{a} {b} {c}|"
    "{a}, {b} and {c} together|{a} together with {b} and {c}|three things: {a}, {b}, {c}|{a} with {b} and also {c}|"
    "{a} next to {b} and {c}",
    "{a} and {b}, and also {c}|{a} accompanied by {b} and {c}|{a} & {b} and {c}|three friends: {a}, {b} and {c}|"
    "{a} plus {b} and {c}",
)

# {n} stands for the plural, {a} for one of them with its article, {w} for the bare word
COUNTS: dict[int, Phrases] = {
    2: Phrases(
        "two {n}|2 {n}|a couple of {n}|a pair of {n}|couple of {n}|pair of {n}|2x {w}|{a} and another {w}|{n} x2|"
        "{a} and one more {w}|two identical {n}|{a} with another {w}|{w} x 2|exactly two {n}|double {w}",
        "{a} and a second {w}|2 pieces of {n}|two times {w}|precisely 2 {n}|{a} plus another {w}",
    ),
    3: Phrases(
        "three {n}|3 {n}|a trio of {n}|trio of {n}|3x {w}|{n} x3|three identical {n}|a few {n}|some {n}|several {n}|"
        "many {n}|lots of {n}|{w} x 3|a group of {n}|exactly three {n}|four {n}|five {n}|triple {w}|a bunch of {n}",
        "three of those {n}|3 pieces of {n}|precisely 3 {n}|three times {w}|quite a few {n}",
    ),
}

OPENINGS = Phrases(
    "could you please draw me|pls draw|please paint|i want|i'd like|gimme|can u make|show me|make me a pic of|"
    "hey, can you generate|generate|draw|photo of|a photo of|i need a picture of|imagine|render|i'd love to see|"
    "create an image of|how about|let's see|would you mind drawing|painting of|sketch of|cartoon of|wallpaper with|"
    "please create a lovely image showing|my daughter wants|my kid asked for|can i have|can i get|yo make|visualize|"
    "illustrate|there's|there is|depict|a sticker of|an icon of|a picture of|an illustration of|a drawing of|"
    "a scene with|an image of|a painting of|hi! please make|i would like to have|can you draw|picture:|prompt:|"
    "ok so basically|i was thinking of|maybe|we need|give me|drawing with|a cute picture with|poster of|logo with|"
    "could you make an image where you see",
    "kindly produce|do me a favor and draw|for my blog i need|any chance of|thinking of|could we get|design|"
    "pretty please make|would be great to see|hello, i'd love a picture with|please generate an image showing|"
    "can you paint me|i need a drawing of|make an illustration with|my son wants to see|let's have|please could i get",
)

CLOSINGS = Phrases(
    "please|thx|thanks!|pls|for my kid|if you can|asap|ok?|thank you so much|lol|haha|xd|:)|plz|thanks in advance|"
    "please and thank you|!!|...|if that works|for a friend|that's it|nothing else|only that|in your style|"
    "make it nice|make it pretty|as nice as possible|would love that",
    "cheers|much appreciated|would be awesome|if possible|many thanks|and make it look good|that's all|for my son",
)

BOOSTERS = Phrases(
    "beautiful|highly detailed|8k|4k|trending on artstation|masterpiece|best quality|ultra realistic|"
    "cinematic lighting|"
    "octane render|unreal engine|hd|sharp focus|award winning|digital art|vibrant|hyperdetailed|professional|"
    "concept art|by greg rutkowski|volumetric light|--ar 16:9|--v 5|dslr|bokeh|studio lighting|soft light|"
    "intricate details|high resolution|photorealistic|artstation|very aesthetic|pixar style|anime style|low poly|"
    "oil painting|watercolor style|vector art|flat design|emoji style|minimalist|high quality|uhd|hdr|best composition",
    "stunningly beautiful|extremely detailed|16k|trending on deviantart|absurdres|cinematic|3d render|"
    "professional lighting|super sharp|gallery quality|comic style",
)

# where the parts of a wish stand: objects, background, quality words
FRAMES = Phrases(
    "{what} {where}|{what} {where}|{what} {where}|{what} {where}|{what} {where}|{what}, {where}|{what} - {where}|"
    "{where} {what}|{where}, {what}|{where}: {what}|{what} {verb} {where}|{what}. {where}.|{what}, it's {where}|"
    "{where} there's {what}|{what}, all {where}|{what} {verb}, {where}|{what}; {where}|{what} and all that {where}|"
    "{what} somewhere {where}|scene {where} with {what}",
    "{what}, and that {where}|{where} you can see {what}|{what} / {where}|{what} {verb}; {where}|{what} ({where})|"
    "{what}... {where}|{what}, preferably {where}",
)

VERBS = "sitting|standing|chilling|sleeping|that is|which is|placed|located|being|just|right|resting|posing|relaxing|"
"seen"

TAG_FRAMES = Phrases("{things}, {tag}|{things} {tag}|{tag}, {things}", "{tag}; {things}|{things}; {tag}")

# wishes that leave something open: {x} and {y} what is named or described, {mood} how it should feel
VAGUE_PAIRS = Phrases(
    "something {mood} with {x} and {y}|{mood} scene with {x} and {y}|{mood} picture that has {x} and {y} in it|"
    "{x} and {y}, {mood}|{mood} vibes, {x} and {y}|idk, maybe {x} with {y}, {mood} mood|"
    "anything {mood} with {x} and {y}|"
    "something with {x} and {y}|a nice picture with {x} and {y} in it|whatever, just have {x} and {y}|"
    "i feel {mood}, give me {x} and {y}",
    "some {mood} thing with {x} and {y}|make it {mood}: {x} and {y}|{mood} image, {x} and {y} please|"
    "surprise me with {x} and {y}",
)
VAGUE_SINGLES = Phrases(
    "something {mood} with {x}|{mood} scene with {x}|{mood} picture that has {x} in it|{x}, {mood}|{mood} vibes, {x}|"
    "idk, maybe {x}, {mood} mood|anything {mood} with {x}|something with {x}|a nice picture with {x} in it|"
    "whatever, just have {x}|i feel {mood}, give me {x}|{x}|{x} please|draw {x}",
    "some {mood} thing with {x}|make it {mood}: {x}|{mood} image, {x} please|surprise me with {x}|i fancy {x}",
)
VAGUE_MOODS = Phrases(
    "something {mood}|{mood} vibes|make it {mood}|anything {mood}|i feel {mood} today|a {mood} picture|"
    "{mood} wallpaper|"
    "draw me something {mood} please|show me a {mood} scene|{mood}",
    "some {mood} thing|i'd like it {mood}|a {mood} image please|surprise me with something {mood}",
)
VAGUE_PLACES = Phrases(
    "something {where}|anything {where}|a picture {where}|draw something nice {where}|a scene {where}|{where} please|"
    "whatever {where}|just something {where}|{where}",
    "some thing or other {where}|any picture {where}|surprise me with something {where}",
)
VAGUE_ANYTHINGS = Phrases(
    "surprise me|anything|something cool|draw something|idk|whatever you like|a picture please|make something nice|"
    "show me what you can do|random picture|i'm bored, draw|test|hello|hi|you choose|art",
    "anything you want|just draw|dealer's choice|something pretty",
)
