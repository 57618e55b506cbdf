"""Have a wish rewritten into a prompt, paint it, and check that the picture shows it."""

from diffserve import CombinedEngine, load_settings
from diffserve.experiments import match_prompts

engine = CombinedEngine.from_settings(load_settings())
rewriter = engine.rewriter
assert rewriter is not None, "the language model ships with the package"
prompt = rewriter.rewrite("pls draw me 2 doggos chillin on teh beach")[0].prompt
[result] = engine.engine.generate(prompt)
result.image.save("dogs.png")
print(prompt, "| exact:", match_prompts([result.pixels], [prompt]).exact)
