//! The results as text.

use std::fmt::{self, Write as _};

use ssi_hv::size::ByteSize;
use ssi_hv_api::bench::{Bar, Transport, TransportBench, Trips};

/// Length of the longest bar.
const BAR_COLUMNS: u64 = 40;

pub(super) fn of(result: &TransportBench) -> String {
    let mut text = String::new();
    write(&mut text, result).expect("writing to a string does not fail");
    text
}

fn write(text: &mut String, result: &TransportBench) -> fmt::Result {
    let donor = result.donor.as_deref().unwrap_or("in this process");
    let host = &result.host;
    writeln!(
        text,
        "{}, Linux {}; donor {donor}",
        host.cpu_model, host.kernel
    )?;
    for measured in &result.transports {
        write_one(text, measured)?;
    }
    if let Some(cost) = &result.registration {
        writeln!(
            text,
            "\n{:<18}{:>12}{:>12}{:>12}",
            "registration, us", "first", "again", "end"
        )?;
        for time in &cost.memory {
            writeln!(
                text,
                "{:<18}{:>12.1}{:>12.1}{:>12.1}",
                size(time.bytes as u64),
                time.first_us,
                time.again_us,
                time.end_us
            )?;
        }
        for time in &cost.staging {
            let name = format!("staging {}", size(time.bytes as u64));
            writeln!(text, "{name:<18}{:>12.1}", time.made_us)?;
        }
    }
    for skipped in &result.skipped {
        writeln!(text, "\n{}: not measured: {}", skipped.kind, skipped.reason)?;
    }
    writeln!(
        text,
        "\n{} bytes verified, {} wrong",
        result.verified_bytes, result.corrupt_bytes
    )
}

fn write_one(text: &mut String, measured: &Transport) -> fmt::Result {
    let mib = |rate: f64| rate / f64::from(1 << 20);
    write!(text, "\n{}", measured.kind)?;
    if let Some(made) = &measured.connections {
        write!(
            text,
            ": {} connections, {:.2} ms the first, {:.2} ms the others (median)",
            made.count, made.first_ms, made.others_ms
        )?;
    }
    if let Some(rate) = measured.write_bytes_per_second {
        write!(text, "; pages written at {:.0} MiB/s", mib(rate))?;
    }
    writeln!(
        text,
        "\n{:<9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>8}{:>11}{:>9}{:>9}",
        "round, us",
        "mean",
        "p50",
        "p90",
        "p95",
        "p99",
        "p99.9",
        "max",
        "jitter",
        "messages/s",
        "MiB/s",
        "CPU/page"
    )?;
    for of_size in &measured.sizes {
        write_trips(text, &size(of_size.bytes.into()), &of_size.trips)?;
        writeln!(
            text,
            "{:>11.0}{:>9.0}{:>9.2}",
            of_size.messages_per_second,
            mib(of_size.stream_bytes_per_second),
            of_size.cpu_us_per_page
        )?;
    }
    if let Some(writes) = &measured.writes {
        write_trips(text, "write 4K", writes)?;
        writeln!(text)?;
    }
    write_bars(text, &measured.page_histogram)
}

fn write_trips(text: &mut String, name: &str, trips: &Trips) -> fmt::Result {
    let times = &trips.latency_us;
    write!(
        text,
        "{name:<9}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>10.1}{:>8.2}",
        trips.mean_us,
        times.p50,
        times.p90,
        trips.p95_us,
        times.p99,
        times.p999,
        times.max,
        trips.jitter
    )
}

fn write_bars(text: &mut String, bars: &[Bar]) -> fmt::Result {
    let Some(longest) = bars
        .iter()
        .map(|bar| bar.count)
        .max()
        .filter(|&most| most > 0)
    else {
        return Ok(());
    };
    writeln!(text, "round trips of a page, up to us:")?;
    for bar in bars {
        let columns = (bar.count * BAR_COLUMNS).div_ceil(longest);
        let columns = usize::try_from(columns).unwrap_or(0);
        writeln!(
            text,
            "{:>9.1} {:<40} {}",
            bar.up_to_us,
            "#".repeat(columns),
            bar.count
        )?;
    }
    Ok(())
}

fn size(bytes: u64) -> String {
    ByteSize::from_bytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_count_and_what_was_there_can_be_seen() {
        let mut text = String::new();
        let bars =
            [(5.0, 1), (10.0, 4000), (20.0, 0)].map(|(up_to_us, count)| Bar { up_to_us, count });
        write_bars(&mut text, &bars).expect("written");
        let columns: Vec<usize> = text
            .lines()
            .skip(1)
            .map(|line| line.matches('#').count())
            .collect();
        assert_eq!(columns, [1, 40, 0]);
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }
}
