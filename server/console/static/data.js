// Shows data as they are trained on.

import { formToken, notify } from "./console.js";

const form = document.getElementById("data");
const { text, file, model, train_on: trainOn } = form.elements;
const status = document.getElementById("status");
const shown = document.getElementById("shown");

file.addEventListener("change", async () => {
  if (file.files[0]) text.value = await file.files[0].text();
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  status.textContent = "reading";
  try {
    const query = new URLSearchParams({ model: model.value, train_on: trainOn.value });
    const answer = await fetch(`${form.getAttribute("action")}?${query}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Form-Token": formToken },
      body: text.value,
    });
    if (!answer.ok) throw new Error((await answer.json()).detail);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    shown.replaceChildren(...page.body.children);
    status.textContent = `${shown.querySelectorAll("section").length} shown`;
  } catch (error) {
    status.textContent = "failed";
    notify(error.message, true);
  }
});
