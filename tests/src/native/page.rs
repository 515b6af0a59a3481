//! The HTML page of a report, checked in a browser.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use serde_json::{Value, json};

use super::browser::{Browser, Opened};
use super::{Context, succeed_within, tiny};
use crate::e2e::{Result, Verdict};

/// Deadline of a guest, and of rendering the page.
const DEADLINE: Duration = Duration::from_secs(60);
/// Window sizes: a desktop's and a phone's.
const WINDOWS: [(&str, (u32, u32), bool); 2] =
    [("desktop", (1280, 900), false), ("phone", (390, 844), true)];
/// The guest walks four times through 46 MiB, of which 30 MiB are remote on each pass.
const PAGES_MIN: u64 = 20_000;
/// Text smaller than this (in CSS pixels) is hard to read.
const LETTERS_PX_MIN: f64 = 9.0;

/// Measures the width of the page, what exceeds it, and the smallest text.
const MEASURE: &str = "(() => {
    const root = document.documentElement;
    const all = [...document.querySelectorAll('body *')];
    // Drawings clip their contents, and scrolling elements may be wider.
    const inside = e => !e.parentElement.closest('svg, .scroll');
    const wide = all.filter(inside).filter(e => e.getBoundingClientRect().right > root.clientWidth + 0.5);
    const size = e => parseFloat(getComputedStyle(e).fontSize) *
        (e.ownerSVGElement ? e.getScreenCTM().a : 1);
    const texts = all.filter(e => e.textContent.trim() && !e.children.length && e.tagName !== 'title');
    return {
        scroll: root.scrollWidth, client: root.clientWidth, texts: texts.length,
        wide: wide.map(e => e.tagName + '.' + e.className).slice(0, 5),
        letters: Math.min(...texts.map(size)),
    };
})()";

/// A page with every defect that the check looks for.
const BAD: &str = "<!DOCTYPE html><meta name=viewport content=\"width=device-width\"><title>bad</title>\
    <img src=\"http://192.0.2.1/a.png\"><script>console.error('no')</script>\
    <div style=\"width:3000px;font-size:3px\">wide</div>";

pub(super) fn check(context: &Context) -> Result {
    if let Some(reason) = Browser::missing() {
        return Ok(Verdict::Skip(reason));
    }
    if let Err(error) = tiny::kvm() {
        return Ok(Verdict::Skip(format!("no VM to report of: {error}")));
    }
    let page = page_of_a_run(context)?;
    let mut browser = Browser::start(&context.artifacts.join("browser.log"))?;
    for (name, size, mobile) in WINDOWS {
        let mut opened = browser.open(&page, size, mobile)?;
        look(&mut browser, &mut opened, context, name).with_context(|| {
            format!("{} in a window of {} by {}", page.display(), size.0, size.1)
        })?;
    }
    // The same check must reject a bad page.
    let bad = context.artifacts.join("bad.html");
    std::fs::write(&bad, BAD)?;
    let mut opened = browser.open(&bad, WINDOWS[1].1, true)?;
    let problems = problems(&mut browser, &mut opened)?;
    ensure!(problems.len() == 4, "a bad page looks right: {problems:?}");
    Ok(Verdict::Pass)
}

/// Renders the page of a new run, with names of the greatest length in the report.
fn page_of_a_run(context: &Context) -> anyhow::Result<PathBuf> {
    let file = context.artifacts.join("report.json");
    let loopback = ["--transport", "loopback"];
    tiny::run(&context.product(), &loopback, &file, DEADLINE)?;
    let mut report: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    // On a fast host almost all pages may be prefetched.
    let came = ["/faults/remote/count", "/prefetch/used"].map(|at| report.pointer(at));
    let came: u64 = came.into_iter().flatten().filter_map(Value::as_u64).sum();
    ensure!(came > PAGES_MIN, "only {came} pages came: {report}");
    report["guest"]["kernel"] = format!("/srv/kernels/{}/vmlinuz", "6.1.0-long".repeat(12)).into();
    report["errors"] = json!([format!("donor {}:7000 is away", "a-host.".repeat(20))]);
    std::fs::write(&file, serde_json::to_vec(&report)?)?;
    let page = context.artifacts.join("report.html");
    let mut make = Command::new(context.product());
    make.arg("report").arg(&file).arg("-o").arg(&page);
    succeed_within(&mut make, DEADLINE)?;
    Ok(page)
}

/// Fails unless the page is without defects; saves its screenshots.
fn look(
    browser: &mut Browser,
    opened: &mut Opened,
    context: &Context,
    name: &str,
) -> anyhow::Result<()> {
    let problems = problems(browser, opened)?;
    let whole = json!({"captureBeyondViewport": true});
    let picture = browser.page(opened, "Page.captureScreenshot", &whole)?;
    save(&picture, &context.artifacts.join(format!("{name}.png")))?;
    ensure!(problems.is_empty(), "{}", problems.join("; "));
    if name == WINDOWS[0].0 {
        let printed = browser.page(
            opened,
            "Page.printToPDF",
            &json!({"preferCSSPageSize": true}),
        )?;
        let bytes = save(&printed, &context.artifacts.join("print.pdf"))?;
        let pages = pages(&bytes);
        ensure!((1..=4).contains(&pages), "{pages} pages are printed");
        context.note(format!("{pages} pages when printed"));
    }
    Ok(())
}

/// Returns the defects of a page.
fn problems(browser: &mut Browser, opened: &mut Opened) -> anyhow::Result<Vec<String>> {
    let seen = browser.evaluate(opened, MEASURE)?;
    let number = |name: &str| {
        seen[name]
            .as_f64()
            .with_context(|| format!("no {name}: {seen}"))
    };
    ensure!(number("texts")? > 0.0, "the page is empty: {seen}");
    let mut problems = Vec::new();
    if number("scroll")? > number("client")? || seen["wide"] != json!([]) {
        problems.push(format!("it is wider than its window: {seen}"));
    }
    if number("letters")? < LETTERS_PX_MIN {
        problems.push(format!("letters of {} px", number("letters")?));
    }
    if !opened.requests.is_empty() {
        problems.push(format!("it asks for {:?}", opened.requests));
    }
    if !opened.complaints.is_empty() {
        problems.push(format!("the console says {:?}", opened.complaints));
    }
    Ok(problems)
}

/// Writes a base64 answer of the browser to a file.
fn save(answer: &Value, path: &Path) -> anyhow::Result<Vec<u8>> {
    let data = answer["data"].as_str().context("no data")?;
    let bytes = base64::engine::general_purpose::STANDARD.decode(data)?;
    std::fs::write(path, &bytes).with_context(|| path.display().to_string())?;
    Ok(bytes)
}

/// Counts the pages of a PDF file with uncompressed objects.
fn pages(pdf: &[u8]) -> usize {
    let text = String::from_utf8_lossy(pdf);
    let kinds = text.split("/Type /Page").skip(1);
    kinds.filter(|rest| !rest.starts_with('s')).count()
}
