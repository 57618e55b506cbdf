"""A little Spanish, German and French, for those who wish in their own words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """Objects with their articles, backgrounds as whole phrases, relations as patterns, and openings."""

    objects: dict[str, str]
    backgrounds: dict[str, str]
    relations: dict[str, str]
    openings: tuple[str, ...]


SPANISH = Language(
    objects={
        "cat": "un gato", "dog": "un perro", "fox": "un zorro", "bear": "un oso", "frog": "una rana", "pig": "un cerdo",
        "monkey": "un mono", "duck": "un pato", "owl": "un búho", "fish": "un pez", "lion": "un león", "sun": "el sol",
        "butterfly": "una mariposa", "apple": "una manzana", "lemon": "un limón", "strawberry": "una fresa",
        "house": "una casa", "castle": "un castillo", "moon": "la luna", "star": "una estrella", "car": "un coche",
        "rose": "una rosa", "crown": "una corona", "chicken": "una gallina", "bicycle": "una bicicleta",
    },
    backgrounds={
        "red": "sobre fondo rojo", "yellow": "sobre fondo amarillo", "green": "sobre fondo verde",
        "blue": "sobre fondo azul", "pink": "sobre fondo rosa", "white": "sobre fondo blanco",
        "black": "sobre fondo negro", "purple": "sobre fondo morado", "beach": "en la playa", "night sky": "de noche",
        "desert": "en el desierto", "snow": "en la nieve", "ocean": "en el mar", "city": "en la ciudad",
        "mountains": "en las montañas", "meadow": "en el prado",
    },
    relations={
        "left of": "{a} a la izquierda de {b}", "right of": "{a} a la derecha de {b}", "above": "{a} encima de {b}",
        "below": "{a} debajo de {b}", "next to": "{a} y {b}",
    },
    openings=("", "", "dibuja", "quiero", "por favor dibuja", "una foto de"),
)  # fmt: skip

GERMAN = Language(
    objects={
        "cat": "eine katze", "dog": "ein hund", "fox": "ein fuchs", "bear": "ein bär", "frog": "ein frosch",
        "pig": "ein schwein", "monkey": "ein affe", "duck": "eine ente", "owl": "eine eule", "fish": "ein fisch",
        "lion": "ein löwe", "sun": "die sonne", "butterfly": "ein schmetterling", "apple": "ein apfel",
        "lemon": "eine zitrone", "strawberry": "eine erdbeere", "house": "ein haus", "castle": "ein schloss",
        "moon": "der mond", "star": "ein stern", "car": "ein auto", "rose": "eine rose", "crown": "eine krone",
        "chicken": "ein huhn", "bicycle": "ein fahrrad",
    },
    backgrounds={
        "red": "auf rotem hintergrund", "yellow": "auf gelbem hintergrund", "green": "auf grünem hintergrund",
        "blue": "auf blauem hintergrund", "pink": "auf rosa hintergrund", "white": "auf weißem hintergrund",
        "black": "auf schwarzem hintergrund", "purple": "auf lila hintergrund", "beach": "am strand",
        "night sky": "bei nacht", "desert": "in der wüste", "snow": "im schnee", "ocean": "im meer",
        "city": "in der stadt", "mountains": "in den bergen", "meadow": "auf der wiese",
    },
    relations={
        "left of": "{a} links von {b}", "right of": "{a} rechts von {b}", "above": "{a} über {b}",
        "below": "{a} unter {b}", "next to": "{a} und {b}",
    },
    openings=("", "", "zeichne", "ich möchte", "bitte male", "ein bild mit"),
)  # fmt: skip

FRENCH = Language(
    objects={
        "cat": "un chat", "dog": "un chien", "fox": "un renard", "bear": "un ours", "frog": "une grenouille",
        "pig": "un cochon", "monkey": "un singe", "duck": "un canard", "owl": "un hibou", "fish": "un poisson",
        "lion": "un lion", "sun": "le soleil", "butterfly": "un papillon", "apple": "une pomme", "lemon": "un citron",
        "strawberry": "une fraise", "house": "une maison", "castle": "un château", "moon": "la lune",
        "star": "une étoile", "car": "une voiture", "rose": "une rose", "crown": "une couronne",
        "chicken": "une poule", "bicycle": "un vélo",
    },
    backgrounds={
        "red": "sur fond rouge", "yellow": "sur fond jaune", "green": "sur fond vert", "blue": "sur fond bleu",
        "pink": "sur fond rose", "white": "sur fond blanc", "black": "sur fond noir", "purple": "sur fond violet",
        "beach": "sur la plage", "night sky": "la nuit", "desert": "dans le désert", "snow": "dans la neige",
        "ocean": "dans la mer", "city": "en ville", "mountains": "à la montagne", "meadow": "dans la prairie",
    },
    relations={
        "left of": "{a} à gauche de {b}", "right of": "{a} à droite de {b}", "above": "{a} au-dessus de {b}",
        "below": "{a} sous {b}", "next to": "{a} et {b}",
    },
    openings=("", "", "dessine", "je veux", "dessine-moi", "une image avec"),
)  # fmt: skip

LANGUAGES: tuple[Language, ...] = (SPANISH, GERMAN, FRENCH)
