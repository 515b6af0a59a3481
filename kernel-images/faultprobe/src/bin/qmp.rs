//! Controls a QEMU of a testbed host through its QMP socket (docs/interop/qmp-spec of QEMU): sends
//! commands one after the other, and waits for events.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

const USAGE: &str = "qmp: write qmp SOCKET STEP..., where a STEP is
  COMMAND             such as query-migrate
  COMMAND=ARGUMENTS   ARGUMENTS is a JSON object
  event:NAME          waits for an event of this name, also an earlier one of this connection
Prints a line of JSON for each step: {\"return\":...} or the event.";

/// How long QEMU may be silent while an answer or an event is awaited.
const SILENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((socket, steps)) = arguments
        .split_first()
        .filter(|(_, steps)| !steps.is_empty())
    else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(socket, steps, &mut std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("qmp: {socket}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Takes the steps in order and writes a line for each.
fn run(socket: &str, steps: &[String], output: &mut impl Write) -> Result<(), String> {
    let steps: Vec<Step> = steps
        .iter()
        .map(|s| Step::parse(s))
        .collect::<Result<_, _>>()?;
    let stream = UnixStream::connect(socket).map_err(|e| e.to_string())?;
    let mut qemu = Qemu::open(stream)?;
    for step in steps {
        let line = match step {
            Step::Command(command) => json!({"return": qemu.execute(&command)?}),
            Step::Event(name) => qemu.event(&name)?,
        };
        writeln!(output, "{line}").map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// A step to take.
#[derive(Debug, PartialEq)]
enum Step {
    /// A command as QMP has it.
    Command(Value),
    /// Waiting for an event of this name.
    Event(String),
}

impl Step {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("event:") {
            return Ok(Self::Event(name.to_owned()));
        }
        let Some((command, arguments)) = text.split_once('=') else {
            return Ok(Self::Command(json!({"execute": text})));
        };
        match serde_json::from_str(arguments) {
            Ok(arguments @ Value::Object(_)) => Ok(Self::Command(
                json!({"execute": command, "arguments": arguments}),
            )),
            _ => Err(format!("the arguments of \"{text}\" are no JSON object")),
        }
    }
}

/// A connection in command mode.
struct Qemu {
    stream: BufReader<UnixStream>,
    /// Events that came while something else was awaited.
    events: Vec<Value>,
}

impl Qemu {
    fn open(stream: UnixStream) -> Result<Self, String> {
        let limit = Some(SILENCE);
        let limited = stream
            .set_read_timeout(limit)
            .and(stream.set_write_timeout(limit));
        limited.map_err(|e| e.to_string())?;
        let mut qemu = Self {
            stream: BufReader::new(stream),
            events: Vec::new(),
        };
        let greeting = qemu.read("its greeting")?;
        if greeting["QMP"].is_null() {
            return Err(format!("this is no QMP server: {greeting}"));
        }
        qemu.execute(&json!({"execute": "qmp_capabilities"}))?;
        Ok(qemu)
    }

    /// Sends a command and returns what it returns.
    fn execute(&mut self, command: &Value) -> Result<Value, String> {
        let name = command["execute"].as_str().unwrap_or_default();
        let sent = writeln!(self.stream.get_mut(), "{command}");
        sent.map_err(|e| format!("{name}: {e}"))?;
        loop {
            let mut answer = self.read(name)?;
            if answer["event"].is_string() {
                self.events.push(answer);
            } else if answer["error"].is_object() {
                return Err(format!("{name}: {}", answer["error"]["desc"]));
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for an event.
    fn event(&mut self, name: &str) -> Result<Value, String> {
        loop {
            if let Some(index) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(index));
            }
            let message = self.read(name)?;
            self.events.push(message);
        }
    }

    fn read(&mut self, what: &str) -> Result<Value, String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err(format!("the connection ended before {what}")),
            Ok(_) => serde_json::from_str(&line).map_err(|e| format!("{what}: {e} in {line:?}")),
            Err(error) => Err(format!("no {what} in {} s: {error}", SILENCE.as_secs())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Serves one connection with these answers, one for each line, and returns what was sent.
    fn talk(answers: &'static [&'static str], steps: &[&str]) -> (Result<String, String>, String) {
        let dir = std::env::temp_dir().join(format!("qmp-{:?}", std::thread::current().id()));
        let path = format!("{}-{}", dir.display(), std::process::id());
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            let mut said = String::new();
            writeln!(stream, "{{\"QMP\":{{}}}}").unwrap();
            for answer in [&["{\"return\":{}}"], answers].concat() {
                if lines.read_line(&mut said).unwrap() == 0 {
                    break;
                }
                writeln!(stream, "{answer}").unwrap();
            }
            said
        });
        let steps: Vec<String> = steps.iter().map(|s| (*s).to_owned()).collect();
        let mut output = Vec::new();
        let result = run(&path, &steps, &mut output);
        std::fs::remove_file(&path).unwrap();
        let output = String::from_utf8(output).unwrap();
        (result.map(|()| output), server.join().unwrap())
    }

    #[test]
    fn commands_are_answered_in_order_and_an_early_event_is_not_lost() {
        let answers = &["{\"event\":\"RESUME\"}\n{\"return\":{\"status\":\"x\"}}"];
        let (output, said) = talk(answers, &["migrate={\"uri\":\"tcp:1\"}", "event:RESUME"]);
        assert_eq!(
            output.unwrap(),
            "{\"return\":{\"status\":\"x\"}}\n{\"event\":\"RESUME\"}\n"
        );
        let sent: Vec<Value> = said
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(sent[0]["execute"], "qmp_capabilities");
        assert_eq!(
            sent[1],
            json!({"execute": "migrate", "arguments": {"uri": "tcp:1"}})
        );
    }

    #[test]
    fn a_refused_command_and_an_ended_connection_are_errors() {
        let refused = &["{\"error\":{\"desc\":\"no userfaultfd\"}}"];
        let error = talk(refused, &["migrate-set-capabilities={}"])
            .0
            .unwrap_err();
        assert!(error.contains("migrate-set-capabilities") && error.contains("no userfaultfd"));
        let error = talk(&[], &["event:RESUME"]).0.unwrap_err();
        assert!(error.contains("ended before RESUME"), "{error}");
    }

    #[test]
    fn arguments_that_are_no_object_are_refused() {
        assert!(Step::parse("migrate=[1]").is_err());
        assert!(Step::parse("migrate=").is_err());
        assert_eq!(Step::parse("event:STOP"), Ok(Step::Event("STOP".into())));
    }
}
