//! The rate of CPUs that run a process each. Threads of one process share its page tables, which
//! CPUs on several hosts may need for writing; processes do not.
//!
//! A process for a CPU is this program with `--compute CPU`: it reads orders from its standard
//! input, a line each, and answers each with a line.

use std::hint::spin_loop;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::team::{self, Deadline};
use super::work::{Computed, Rate};
use crate::cpu::now_ticks;

/// How long an answer is awaited, beside the time that was ordered: a program starts within seconds
/// also where its CPU is on another host.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longest time of an answer, for which the rate of the counter need not be known exactly.
const TIME_MAX: Duration = Duration::from_secs(3600);
/// For which part of their time processes must compute at the same time, or their rates are no sum.
const TOGETHER_MIN: f64 = 0.9;
/// How often they are asked again, with more time to begin, if they did not.
const TRIES: u64 = 3;

/// What a process is to do.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    /// The value of the counter at which it begins.
    begin: u64,
    /// For so many ticks.
    ticks: u64,
}

/// The process of `--compute`: pins itself, says so by an empty result, and obeys the orders of
/// `input` until that ends.
///
/// # Errors
/// Fails when the CPU cannot be used, an order is none, or `output` is closed.
pub fn obey(cpu: usize, input: impl BufRead, mut output: impl Write) -> Result<(), String> {
    team::pin(cpu).map_err(|error| format!("CPU {cpu}: {error}"))?;
    let mut answer = |computed: &Computed| {
        let line = serde_json::to_string(computed).map_err(|error| error.to_string())?;
        let written = writeln!(output, "{line}").and_then(|()| output.flush());
        written.map_err(|error| format!("writing a result: {error}"))
    };
    answer(&Computed::default())?;
    for line in input.lines() {
        let line = line.map_err(|error| format!("reading an order: {error}"))?;
        let order: Order = serde_json::from_str(&line)
            .map_err(|error| format!("--compute is for this program alone: {line:?}: {error}"))?;
        while now_ticks() < order.begin {
            spin_loop();
        }
        answer(&Computed::until(&Deadline::after(order.ticks)))?;
    }
    Ok(())
}

/// A process on a CPU. It ends when this is dropped.
struct Process {
    cpu: usize,
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Process {
    fn start(program: &Path, cpu: usize) -> Result<Self, String> {
        let failed = |error| format!("a process for CPU {cpu}: {}: {error}", program.display());
        let mut child = Command::new(program)
            .args(["--compute", &cpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (orders, output) = pipes.ok_or("a process without pipes")?;
        let (sender, answers) = mpsc::channel();
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        let mut process = Self {
            cpu,
            child,
            orders,
            answers,
        };
        thread::Builder::new()
            .spawn(move || {
                lines
                    .take_while(|line| sender.send(line.clone()).is_ok())
                    .count()
            })
            .map_err(failed)?;
        process.answer(PATIENCE)?;
        Ok(process)
    }

    fn order(&mut self, order: &Order) -> Result<(), String> {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        let written = writeln!(self.orders, "{line}");
        written.map_err(|error| format!("the process on CPU {} ended: {error}", self.cpu))
    }

    fn answer(&mut self, within: Duration) -> Result<Computed, String> {
        let cpu = self.cpu;
        let line = self.answers.recv_timeout(within);
        let line = line.map_err(|error| {
            format!("the process on CPU {cpu} did not answer within {within:?}: {error}")
        })?;
        serde_json::from_str(&line)
            .map_err(|error| format!("the process on CPU {cpu} answered {line:?}: {error}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has nothing to lose, and may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures processes of `program` on these CPUs: the first ones, at most `alone_max`, alone for
/// `ticks` each, then all together. Returns the rate, and how many computations were wrong.
///
/// # Errors
/// Fails when a process cannot be started, ends, or does not answer.
pub fn rate(
    program: &Path,
    cpus: &[usize],
    alone_max: usize,
    ticks: u64,
) -> Result<(Rate, u64), String> {
    let processes = cpus.iter().map(|&cpu| Process::start(program, cpu));
    let mut processes = processes.collect::<Result<Vec<_>, _>>()?;
    let mut wrong = 0;
    // What processes compute that begin so many ticks from now.
    let mut compute = |who: &mut [Process], margin: u64| -> Result<Vec<Computed>, String> {
        let begin = now_ticks() + margin;
        for process in &mut *who {
            process.order(&Order { begin, ticks })?;
        }
        let computed = who.iter_mut().map(|one| one.answer(PATIENCE + TIME_MAX));
        let computed = computed.collect::<Result<Vec<_>, _>>()?;
        wrong += computed.iter().map(|one| one.wrong).sum::<u64>();
        Ok(computed)
    };
    let mut alone = Vec::new();
    for process in processes.chunks_mut(1).take(alone_max) {
        alone.push(sum(&compute(process, 0)?));
    }
    let together = all_together(|attempt| compute(&mut processes, attempt * ticks))?;
    Ok((Rate::of(alone, together), wrong))
}

fn sum(computed: &[Computed]) -> f64 {
    computed.iter().map(|one| one.rate()).sum()
}

/// Returns the rate of processes that computed at the same time. The number of the attempt says how
/// many times the work's duration they have until they begin: an order must have come by then.
fn all_together(
    mut compute: impl FnMut(u64) -> Result<Vec<Computed>, String>,
) -> Result<f64, String> {
    let mut best: f64 = 0.0;
    for attempt in 1..=TRIES {
        let computed = compute(attempt)?;
        let together = Computed::together(&computed);
        if together >= TOGETHER_MIN {
            return Ok(sum(&computed));
        }
        best = best.max(together);
    }
    Err(format!(
        "the processes computed at the same time for {:.0} % of their time at most, and {:.0} % are \
         needed: measure for longer (--seconds)",
        best * 100.0,
        TOGETHER_MIN * 100.0
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_obeyed_and_nonsense_is_refused() {
        let cpu = team::cpus().unwrap()[0];
        let order = serde_json::to_string(&Order {
            begin: now_ticks(),
            ticks: 100_000_000,
        });
        let mut output = Vec::new();
        obey(cpu, format!("{}\n", order.unwrap()).as_bytes(), &mut output).unwrap();
        let answers = String::from_utf8(output).unwrap();
        let answers = answers
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        let answers: Vec<Computed> = answers.collect();
        assert_eq!(answers.len(), 2, "{answers:?}");
        assert_eq!(answers[0].count, 0);
        assert!(answers[1].count > 0 && answers[1].rate() > 0.0);
        assert_eq!(answers[1].wrong, 0);
        let error = obey(cpu, "7\n".as_bytes(), Vec::new()).unwrap_err();
        assert!(
            error.contains("--compute") && error.contains('7'),
            "{error}"
        );
    }

    #[test]
    fn processes_that_take_turns_are_asked_again_and_then_refused() {
        let computed = |began| Computed {
            count: 5,
            began,
            ticks: 1_000_000,
            wrong: 0,
        };
        let mut margins = Vec::new();
        let late = |margins: &mut Vec<u64>, attempt, good| {
            margins.push(attempt);
            let late = if attempt < good { 1_000_000 } else { 100_000 };
            Ok(vec![computed(0), computed(late)])
        };
        let rate = all_together(|attempt| late(&mut margins, attempt, 2)).unwrap();
        assert!((rate - 10.0).abs() < 1e-9, "{rate}");
        assert_eq!(margins, [1, 2]);
        let error = all_together(|attempt| late(&mut margins, attempt, TRIES + 1)).unwrap_err();
        assert!(
            error.contains("0 %") && error.contains("90 %") && error.contains("--seconds"),
            "{error}"
        );
        assert_eq!(margins, [1, 2, 1, 2, 3]);
    }

    #[test]
    fn a_program_that_ends_or_says_something_else_is_an_error() {
        for program in ["/bin/true", "/bin/echo", "/nonexistent"] {
            let cpus = team::cpus().unwrap();
            let error = rate(Path::new(program), &cpus[..1], 1, 1000).unwrap_err();
            assert!(error.contains(&format!("CPU {}", cpus[0])), "{error}");
        }
    }
}
