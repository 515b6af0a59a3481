//! What can be asked: tables of methods, paths and functions.

use std::fmt;

use serde::Serialize;

use super::changes::NextChange;
use super::protocol::{Refusal, RefusalCode};

/// A method of HTTP that means something here. `HEAD` is `GET` without the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Look.
    Get,
    /// Do something.
    Post,
    /// Set something.
    Put,
}

impl Method {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Put => "PUT",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a function of the table does, which decides who carries it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// It only looks: several at once.
    Look,
    /// It changes something: one at a time.
    Change,
    /// It ends everything: at once, whatever else is under way.
    End,
}

/// What bodies are, but for some.
pub const JSON: &str = "application/json";

/// An answer: the status code, 200 or 202, and the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// 200 for what is done, 202 for what was begun.
    pub status: u16,
    /// What the body is, as the header `Content-Type` has it.
    pub content_type: &'static str,
    /// The body.
    pub body: Vec<u8>,
}

/// What a function gives.
pub type Answer = Result<Done, Refusal>;

/// Gives what a request waits for by its parameters.
pub type Until<S> = fn(&S, &str) -> Result<NextChange, Refusal>;

/// Something that can be asked of an `S`.
#[derive(Debug)]
pub struct Route<S> {
    /// The method.
    pub method: Method,
    /// The path, which begins with [`PREFIX`](super::protocol::PREFIX).
    pub path: &'static str,
    /// What it does.
    pub work: Work,
    /// The status code of its success.
    pub status: u16,
    /// What it may refuse for beside [`RefusalCode::COMMON`].
    pub refuses: &'static [RefusalCode],
    /// Whether a body belongs to the request.
    pub takes_body: bool,
    /// What a request with parameters waits for before it is carried out, if it may have any. It is
    /// called by the thread that speaks HTTP, so it must not wait itself.
    pub until: Option<Until<S>>,
    /// Gives the answer. Must neither touch guest memory nor wait without a deadline.
    pub answer: fn(&S, &[u8]) -> Answer,
}

impl<S> Route<S> {
    /// Something to look at.
    pub const fn look(path: &'static str, answer: fn(&S, &[u8]) -> Answer) -> Self {
        Self {
            method: Method::Get,
            path,
            work: Work::Look,
            status: 200,
            refuses: &[],
            takes_body: false,
            until: None,
            answer,
        }
    }

    /// Whether it may refuse like that.
    #[must_use]
    pub fn may_refuse(&self, code: RefusalCode) -> bool {
        RefusalCode::COMMON.contains(&code) || self.refuses.contains(&code)
    }
}

/// What is asked, and what can be asked of it.
#[derive(Debug)]
pub struct Service<S: 'static> {
    /// What it is about.
    pub subject: S,
    /// The table.
    pub routes: &'static [Route<S>],
}

impl<S> Service<S> {
    /// The route of a request.
    pub(super) fn find(&self, method: &str, path: &str) -> Result<&'static Route<S>, Refusal> {
        // As RFC 9110, section 9.3.2 wants it.
        let method = if method == "HEAD" { "GET" } else { method };
        let here = || self.routes.iter().filter(|route| route.path == path);
        if let Some(route) = here().find(|route| route.method.name() == method) {
            return Ok(route);
        }
        if here().next().is_none() {
            let text = format!("no such path; there are: {}", self.list());
            return Err(Refusal::new(RefusalCode::UnknownPath, text));
        }
        let text = format!("this path takes {}", self.methods_of(path));
        Err(Refusal::new(RefusalCode::UnknownMethod, text))
    }

    /// The methods that a path takes, as the header `Allow` has them.
    pub(super) fn methods_of(&self, path: &str) -> String {
        let here = self.routes.iter().filter(|route| route.path == path);
        let names: Vec<_> = here.map(|route| route.method.name()).collect();
        names.join(", ")
    }

    fn list(&self) -> String {
        let names = self
            .routes
            .iter()
            .map(|r| format!("{} {}", r.method, r.path));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// An answer with a body of JSON.
///
/// # Errors
///
/// When it cannot be JSON.
pub fn answer(status: u16, body: &impl Serialize) -> Answer {
    match serde_json::to_vec(body) {
        Ok(body) => Ok(Done {
            status,
            content_type: JSON,
            body,
        }),
        Err(error) => Err(Refusal::new(RefusalCode::Failed, error.to_string())),
    }
}

/// An answer with a text of another form.
///
/// # Errors
///
/// Never; the type is that of all answers.
pub fn text(content_type: &'static str, body: String) -> Answer {
    Ok(Done {
        status: 200,
        content_type,
        body: body.into_bytes(),
    })
}
