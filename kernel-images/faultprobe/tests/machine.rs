//! The probe on the machine that it is built on.

use std::process::Command;

use serde_json::Value;

fn all<'a>(value: &'a Value, is_true: impl Fn(&'a Value) -> bool) -> bool {
    let values = value.as_array();
    values.is_some_and(|values| !values.is_empty() && values.iter().all(is_true))
}

#[test]
fn this_machine_is_sound_and_every_part_has_rounds() {
    let output = Command::new(env!("CARGO_BIN_EXE_faultprobe"))
        .args(["--ssi", "--seconds", "4"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let report = said.trim_end().strip_prefix("FAULTPROBE ").unwrap();
    let report: Value = serde_json::from_str(report).unwrap();
    assert_eq!(report["violations"], 0, "{report}");
    assert_eq!(report["corrupt_bytes"], 0, "{report}");
    assert!(report["verified_bytes"].as_u64() > Some(1 << 16));
    let ssi = &report["ssi"];
    let has_rounds = |part: &Value| part["rounds"].as_u64() > Some(0);
    for pairs in ["transfers", "wakes", "calls"] {
        assert!(all(&ssi[pairs], has_rounds), "{pairs}: {ssi}");
    }
    let p50 = &ssi["transfers"][0]["latency_us"]["p50"];
    assert!(p50.is_number(), "{ssi}");
    let pairs = ssi["cpus"].as_array().unwrap().len() - 1;
    assert_eq!(ssi["transfers"].as_array().unwrap().len(), pairs.min(8));
    assert_eq!(ssi["times"].as_array().unwrap().len(), pairs.min(8));
    for counter in ["ticket_lock", "mutex", "add", "compare_exchange"] {
        let counter = &ssi[counter];
        assert!(counter["rounds"].is_number(), "{counter}");
        assert!(counter["turns"].as_u64() > Some(0), "{counter}");
        assert_eq!(counter["violations"], 0, "{counter}");
    }
    assert!(all(&ssi["ordering"], has_rounds), "{ssi}");
    assert!(ssi["ordering"].as_array().unwrap().len() >= 8, "{ssi}");
    let has_met = |one: &Value| one["met"].as_u64() > Some(10);
    assert!(
        ssi["ordering"].as_array().unwrap().iter().any(has_met),
        "{ssi}"
    );
    assert!(all(&ssi["times"], |one| one["messages"].as_u64() > Some(0)));
    assert!(ssi["sorted"]["parts"].as_u64() > Some(1), "{ssi}");
    for rate in ["rate", "process_rate"] {
        let rate = &ssi[rate];
        assert!(rate["ratio"].as_f64() > Some(0.2), "{rate}");
        assert!(
            all(&rate["alone"], |rate| rate.as_f64() > Some(0.0)),
            "{rate}"
        );
    }
}
