// A browser that follows a link from another site does not send its cookie at first: if it is signed in, it goes on.

const target = document.querySelector("input[name=next]").value;
const answer = await fetch(target, { redirect: "manual", headers: { Accept: "text/html" } });
if (answer.ok) location.replace(target);
