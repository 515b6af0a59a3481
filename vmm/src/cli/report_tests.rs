//! Tests of the report's fields and of writing it.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::*;

/// Every field that readers were promised, by its path.
#[test]
fn the_fields_have_the_promised_names() {
    let mut report = Report::new(Host::default());
    report.guest.kernel = Some("vmlinux".into());
    report.nodes.push(Node {
        id: 1,
        role: Role::Donor,
        address: Some("127.0.0.1:7000".into()),
        memory_bytes: 4096,
        pages_fetched: 1,
        pages_written_back: 0,
        faults: Some(FaultKind::default()),
        traffic: Some(Traffic::default()),
        rdma: Some(RdmaUsed::default()),
        path: Some(PathUsed {
            tcp: Some(PathMeasured::default()),
            ..PathUsed::default()
        }),
    });
    report.distributions = Some(Distributions {
        remote: vec![(12.5, 3)],
        ..Distributions::default()
    });
    report.timeline = Some(Timeline {
        interval_s: 0.25,
        intervals: vec![FaultCounts::default()],
    });
    report.exec = Some(Exec {
        command: "true".into(),
        exit_status: Some(0),
        ..Exec::default()
    });
    let value = serde_json::to_value(&report).expect("is JSON");
    let percentiles = json!({ "p50": 0.0, "p90": 0.0, "p99": 0.0, "p999": 0.0, "max": 0.0 });
    let stages = json!({ "queue": percentiles, "fetch": percentiles, "install": percentiles });
    let kind = json!({ "count": 0, "latency_us": percentiles, "stages": stages });
    let class = json!({
        "plain_bytes": 0,
        "wire_bytes": 0,
        "pages_compressed": 0,
        "compressing": false,
    });
    let expected: Value = json!({
        "schema": 1,
        "host": { "virtualization": "emulated", "cpu_model": "", "kernel": "" },
        "guest": { "memory_bytes": 0, "cpus": 0, "cpu_pinning": null, "kernel": "vmlinux" },
        "memory": {
            "home_here_bytes": 0,
            "cache_bytes": 0,
            "cached_bytes": 0,
            "resident_bytes": 0,
            "huge_bytes": null,
            "hotplug": null,
        },
        "boot": { "to_init_ms": null, "restarts": 0 },
        "transport": { "kind": "", "tier": "", "bulk": "" },
        "nodes": [{
            "id": 1,
            "role": "donor",
            "address": "127.0.0.1:7000",
            "memory_bytes": 4096,
            "pages_fetched": 1,
            "pages_written_back": 0,
            "faults": kind,
            "traffic": { "urgent": class, "prefetch": class, "write_back": class },
            "rdma": { "pages_read": 0, "pages_written": 0, "connections": 0, "failures": 0 },
            "path": {
                "faults": "",
                "bulk": "",
                "tier": "",
                "tier_changes": 0,
                "latency_estimate_us": 0.0,
                "tcp": { "small_us": 0.0, "page_us": 0.0, "stream_bytes_per_second": 0.0 },
                "udp": null,
                "rdma": null,
            },
        }],
        "faults": {
            "remote": kind,
            "zero": kind,
            "minor": kind,
            "write_protect": kind,
            "stages": stages,
        },
        "evictions": 0,
        "free_pages": { "reported": 0, "dropped_here": 0, "dropped_at_home": 0 },
        "prefetch": { "issued": 0, "used": 0, "wasted": 0, "late": 0 },
        "distributions": { "remote": [[12.5, 3]], "zero": [], "minor": [], "write_protect": [] },
        "timeline": {
            "interval_s": 0.25,
            "intervals": [{ "remote": 0, "zero": 0, "minor": 0, "write_protect": 0 }],
        },
        "exec": { "command": "true", "exit_status": 0, "stdout_bytes": 0, "stderr_bytes": 0 },
        "errors": [],
        "outcome": "",
        "exit_code": 0,
    });
    assert_eq!(value, expected);
    assert_eq!(
        serde_json::from_value::<Report>(value).expect("is a report"),
        report
    );
}

fn files_in(directory: &Path) -> Vec<String> {
    fs::read_dir(directory)
        .expect("the directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect()
}

#[test]
fn preparing_leaves_nothing_behind_and_writing_leaves_the_report_alone() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    let file = ReportFile::prepare(&path).expect("is writable");
    assert!(files_in(directory.path()).is_empty());
    for evictions in [1, 2] {
        let report = Report {
            evictions,
            ..Report::new(Host::default())
        };
        file.write(&report).expect("is written");
        let text = fs::read_to_string(&path).expect("the report");
        assert_eq!(
            serde_json::from_str::<Report>(&text).expect("is a report"),
            report
        );
        assert_eq!(files_in(directory.path()), ["report.json"]);
    }
}

#[test]
fn what_a_process_of_this_number_left_is_in_nobodys_way() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    let left = format!(".report.json.{}.tmp", std::process::id());
    let left = directory.path().join(left);
    fs::write(&left, "half").expect("is written");
    let file = ReportFile::prepare(&path).expect("is writable");
    fs::write(&left, "half").expect("is written");
    file.write(&Report::default()).expect("is written");
    assert_eq!(files_in(directory.path()), ["report.json"]);
}

#[test]
fn a_place_that_cannot_be_written_is_found_before_the_work() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for path in [
        directory.path().join("none/report.json"),
        directory.path().into(),
    ] {
        let message = ReportFile::prepare(&path)
            .expect_err("is not writable")
            .to_string();
        assert!(message.contains(&path.display().to_string()), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn a_full_disk_is_an_error_and_not_a_panic() {
    let file = ReportFile::prepare(Path::new("/dev/full")).expect("a device is written to");
    let error = file
        .write(&Report::default())
        .expect_err("the disk is full");
    let ReportError::Write { source, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
}

#[test]
fn a_failed_write_keeps_the_older_report_and_no_temporary_file() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    fs::write(&path, "older").expect("is written");
    let file = ReportFile::prepare(&path).expect("is writable");
    let gone = directory.path().join("gone");
    fs::rename(directory.path().join("report.json"), &gone).expect("is renamed");
    fs::create_dir(&path).expect("is created");
    assert!(file.write(&Report::default()).is_err());
    assert_eq!(fs::read_to_string(gone).expect("the older"), "older");
    assert_eq!(files_in(directory.path()).len(), 2);
}

#[test]
fn a_symbolic_link_stays_one() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let real = directory.path().join("real.json");
    let link = directory.path().join("link.json");
    fs::write(&real, "").expect("is written");
    std::os::unix::fs::symlink(&real, &link).expect("is linked");
    let file = ReportFile::prepare(&link).expect("is writable");
    file.write(&Report::default()).expect("is written");
    assert!(link.is_symlink());
    assert!(fs::metadata(&real).expect("the report").len() > 0);
}

/// The names of all fields in a value, at any depth.
fn field_names(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| [vec![name.clone()], field_names(value)].concat())
            .collect(),
        Value::Array(values) => values.iter().flat_map(field_names).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_document_has_every_field() {
    let document = include_str!("../../../docs/report.md");
    let value = serde_json::to_value(Report::new(Host::default())).expect("is JSON");
    for name in field_names(&value) {
        assert!(document.contains(&name), "{name} is not in docs/report.md");
    }
}
