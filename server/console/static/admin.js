// Makes a key and shows it once.

import { notify, send } from "./console.js";

const form = document.getElementById("new-key");
form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const fields = form.elements;
  const scopes = [...form.querySelectorAll("[name=scopes]:checked")].map((one) => one.value);
  const body = { name: fields.name.value.trim(), scopes };
  if (fields.rate.value) body.requests_per_minute = Number(fields.rate.value);
  try {
    const answer = await send("POST", form.dataset.url, body);
    document.getElementById("made-key").value = (await answer.json()).key;
    document.getElementById("made").hidden = false;
    form.hidden = true;
  } catch (error) {
    notify(error.message, true);
  }
});
