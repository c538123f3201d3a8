// What all pages share: requests that change something, notices, and times in the reader's zone.

const formToken = document.querySelector("meta[name=form-token]")?.content ?? "";

/** Sends a request with the page's form token; returns the response. Throws an Error with the server's reason. */
export async function send(method, url, body) {
  const headers = { "X-Form-Token": formToken };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer;
}

async function reasonOf(answer) {
  try {
    const content = await answer.json();
    return content.detail ?? content.error?.message ?? answer.statusText;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

/** Shows a message for some seconds; an error stays longer. */
export function notify(words, isBad = false) {
  const notice = document.createElement("div");
  notice.className = isBad ? "notice bad" : "notice";
  notice.textContent = words;
  document.getElementById("notices").append(notice);
  setTimeout(() => notice.remove(), isBad ? 15000 : 5000);
}

function showLocalTimes() {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  for (const time of document.querySelectorAll("time[datetime]")) {
    time.title = time.textContent;
    time.textContent = format.format(new Date(time.dateTime));
  }
}

document.querySelector("[data-sign-out]")?.addEventListener("click", async () => {
  try {
    await send("POST", "/console/sign-out");
    location.assign("/console/sign-in");
  } catch (error) {
    notify(error.message, true);
  }
});

showLocalTimes();
