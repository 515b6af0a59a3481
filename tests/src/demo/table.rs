//! The table that the demo prints at the end.

use std::fmt::Write as _;

use serde_json::Value;

/// Formats the numbers of the guest and of the pager.
pub(super) fn text(probe: &Value, report: &Value) -> String {
    let mut text = format!("{:<16}{:>16}{:>16}\n", "", "in the guest", "in the pager");
    let pager = &report["faults"]["remote"];
    let mut row = |name: &str, guest: &Value, pager: &Value, unit: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{name:<16}{:>16}{:>16}",
            number(guest, unit),
            number(pager, unit)
        );
    };
    // A program cannot see of what kind its faults are: in the guest they are all there were.
    row("faults", &probe["faults"], &Value::Null, "");
    row("remote faults", &Value::Null, &pager["count"], "");
    for key in ["p50", "p90", "p99"] {
        row(
            key,
            &probe["latency_us"][key],
            &pager["latency_us"][key],
            " us",
        );
    }
    for node in report["nodes"].as_array().into_iter().flatten() {
        let mib = node["memory_bytes"].as_u64().unwrap_or(0) >> 20;
        let role = node["role"].as_str().unwrap_or("?");
        let name = format!("node {} {role}", node["id"]);
        let _ = match role {
            "compute" => writeln!(text, "{name:<16}{mib} MiB of local memory"),
            _ => writeln!(
                text,
                "{name:<16}{mib} MiB lent, {} pages fetched, {} written back",
                number(&node["pages_fetched"], ""),
                number(&node["pages_written_back"], ""),
            ),
        };
    }
    let boot = &report["boot"];
    let _ = write!(
        text,
        "time to init    {}",
        number(&boot["to_init_ms"], " ms")
    );
    if let Some(ratio) = boot["ratio_to_local"].as_f64() {
        let local = number(&boot["local_to_init_ms"], " ms");
        let _ = write!(text, ", {ratio:.2} times the {local} with all memory local");
    }
    text.push('\n');
    let verified = probe["verified_bytes"].as_u64().unwrap_or(0) >> 20;
    let _ = writeln!(
        text,
        "verified        {verified} MiB, {} corrupt bytes",
        probe["corrupt_bytes"]
    );
    let kind = report["host"]["virtualization"]
        .as_str()
        .unwrap_or("unknown");
    let _ = write!(
        text,
        "virtualisation  {kind}, transport {}",
        report["transport"]["kind"].as_str().unwrap_or("?")
    );
    text
}

fn number(value: &Value, unit: &str) -> String {
    match value.as_f64() {
        Some(number) => format!("{number:.0}{unit}"),
        None => "-".into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn the_table_puts_guest_and_pager_side_by_side() {
        let probe = json!({"faults": 10, "latency_us": {"p50": 1.6}, "verified_bytes": 1 << 30, "corrupt_bytes": 0});
        let report = json!({
            "faults": {"remote": {"count": 12, "latency_us": {"p50": 1.1}}},
            "nodes": [{"id": 1, "role": "donor", "memory_bytes": 2 << 20, "pages_fetched": 5, "pages_written_back": 4}],
            "boot": {"to_init_ms": 1500.2, "local_to_init_ms": 1000.0, "ratio_to_local": 1.5}, "host": {"virtualization": "emulated"}, "transport": {"kind": "tcp"},
        });
        let text = super::text(&probe, &report);
        assert!(
            text.contains("faults                        10               -")
                && text.contains("remote faults                  -              12"),
            "{text}"
        );
        assert!(
            text.contains("p50                         2 us            1 us"),
            "{text}"
        );
        assert!(
            text.contains("p99                            -               -"),
            "{text}"
        );
        assert!(
            text.contains("node 1 donor    2 MiB lent, 5 pages fetched, 4 written back"),
            "{text}"
        );
        assert!(
            text.contains("1500 ms, 1.50 times the 1000 ms")
                && text.contains("1024 MiB, 0 corrupt"),
            "{text}"
        );
    }
}
